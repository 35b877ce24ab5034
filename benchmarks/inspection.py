"""How long the walk over a bundle's graphs takes: milliseconds beside those of making the graphs' sessions.

python benchmarks/inspection.py [--quick] [--json]
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from lite_models import quiet
from lite_predict import raw_session
from measure import Report, arguments, compare, interleave

from archipel import convert, models, training
from archipel.bundle import WEIGHTS_FILE, generate_key
from archipel.bundle.graphs import inspect_graph
from archipel.converter import Signing, Training

OURS = "archipel"
NETWORKS = {
    "MobileNetV2": (lambda: models.mobilenet_v2(0), torch.zeros(2, 3, 32, 32)),
    "Transformer": (lambda: models.transformer(0), torch.zeros(2, 16, dtype=torch.int64)),
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(options.json, ("onnxruntime", "torch"))
    for name, (network, example) in NETWORKS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "bundle"
            with quiet():
                convert(
                    network(), folder, example=example,
                    training=Training(training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9)),
                    signing=Signing(generate_key()),
                )  # fmt: skip
            paths = sorted(folder.glob("*.onnx"))
            weights = (WEIGHTS_FILE, (folder / WEIGHTS_FILE).stat().st_size)
            graphs = [path.read_bytes() for path in paths]
            runs = {
                OURS: partial(walk, graphs, weights),
                "making their sessions": partial(make_sessions, paths),
            }
            case = f"{name}, {sum(map(len, graphs)) / 1e3:.0f} kB of graphs"
            report.add(compare("inspection", case, OURS, interleave(runs, 0.5 if options.quick else 3.0, warmup=1)))


def walk(graphs: list[bytes], weights: tuple[str, int]) -> None:
    for data in graphs:
        inspect_graph("program", data, weights)


def make_sessions(paths: list[Path]) -> None:
    for path in paths:
        raw_session(path, 1)


if __name__ == "__main__":
    main()
