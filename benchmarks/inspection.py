"""How long the walk over a bundle's graphs takes: python benchmarks/inspection.py"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from archipel import convert, models, training
from archipel.bundle import WEIGHTS_FILE, generate_key
from archipel.bundle.graphs import inspect_graph

RUNS = 5
NETWORKS = {
    "MobileNetV2": (lambda: models.mobilenet_v2(0), torch.zeros(2, 3, 32, 32)),
    "Transformer": (lambda: models.transformer(0), torch.zeros(2, 16, dtype=torch.int64)),
}


def main() -> None:
    print("| network | bytes of graphs | ms, best of 5 |\n|---|---:|---:|")
    for name, (network, example) in NETWORKS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "bundle"
            convert(
                network(), folder, example=example, loss=training.losses.cross_entropy(),
                optimizer=training.optimizers.sgd(momentum=0.9), sign_key=generate_key(),
            )  # fmt: skip
            weights = (WEIGHTS_FILE, (folder / WEIGHTS_FILE).stat().st_size)
            graphs = [path.read_bytes() for path in sorted(folder.glob("*.onnx"))]
        print(f"| {name} | {sum(map(len, graphs)):,} | {1e3 * min(walk(graphs, weights) for _ in range(RUNS)):.1f} |")


def walk(graphs: list[bytes], weights: tuple[str, int]) -> float:
    """Seconds."""
    start = time.perf_counter()
    for data in graphs:
        inspect_graph("program", data, weights)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
