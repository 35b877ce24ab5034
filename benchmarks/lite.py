"""The Lite runtime against other engines, interleaved in one run.

`predict` at batch 1 in float and int8, `fit` against its own step graph, transfer learning with and without the
feature cache, and what a process costs: cold start, import, installed bytes, peak memory.

    python benchmarks/lite.py --install-peers       once: environments of the other engines, about 2.5 GB
    python benchmarks/lite.py                       everything, about half an hour
    python benchmarks/lite.py --quick               about a minute
    python benchmarks/lite.py --only "DS-CNN predict int8" --threads 1

`--only` takes the beginning of a row's name or a part of it. An engine that is not installed is left out, and named.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from itertools import product
from pathlib import Path

from lite_fit import fit_rows, transfer_rows
from lite_models import CASES, Files
from lite_peers import DEFAULT_FOLDER, PACKAGES, PeerError, install
from lite_predict import Peers, predict_rows, say
from lite_process import process_rows
from measure import Report, arguments

QUICK = ("MLP", "DS-CNN")
TRANSFER = ("ResNet-8", "MobileNetV2")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", help="only rows with this in their name; can be repeated")
    parser.add_argument("--threads", action="append", type=int, help="only this number of threads; can be repeated")
    parser.add_argument("--rounds", type=int, help="rounds of a comparison (default 15)")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments")
    parser.add_argument("--without", action="append", default=[], help="leave out torch, litert, openvino or mnn")
    parser.add_argument("--install-peers", action="store_true", help="make the peers' environments, and end")
    options = parser.parse_args()
    if options.install_peers:
        sys.exit(install_all(options.peers))
    options.rounds = options.rounds or (3 if options.quick else 15)
    with tempfile.TemporaryDirectory(prefix="archipel-lite-") as folder:
        run(options, Path(folder), Report(options.json, ("numpy", "onnxruntime", "torch")))


def install_all(folder: Path) -> int:
    failed = 0
    for environment, packages in PACKAGES.items():
        try:
            install(folder, environment, packages)
        except PeerError as error:
            say(str(error))
            failed = 1
    return failed


def run(options: Namespace, folder: Path, report: Report) -> None:
    threads = options.threads or ([1] if options.quick else [1, 2])
    names = [name for name in CASES if not options.quick or options.only or name in QUICK]
    made = {name: Files(name, folder, options.peers / "models") for name in CASES}

    def wanted(row: str) -> bool:
        return not options.only or any(part.lower() in row.lower() for part in options.only)

    engines = [name for name in ("torch", "litert", "openvino", "mnn") if name not in options.without]
    peers = Peers(options.peers, folder, engines)
    try:
        for name, count in product(names, threads):
            for int8 in (False, True):
                if wanted(f"{name} predict" + " int8" * int8):
                    report.add(predict_rows(made[name], count, int8, peers, options.rounds))
    finally:
        # Before the rest, so that nothing of theirs is in memory.
        peers.close()
    for name, count, batch in product(names, threads, (32,) if options.quick else (1, 32)):
        if wanted(f"{name} fit batch {batch}") and (name == "MLP" or not options.quick or options.only):
            report.add(fit_rows(made[name], count, batch, min(options.rounds, 9), 0.05 if options.quick else 0.3))
    try:
        report.add(process_rows(made["FedAvg CNN"], options.peers, wanted, threads, 1 if options.quick else 9))
    except PeerError as error:
        say(f"FedAvg CNN import, cold start, install, rss: left out: {error}")
    for name, count in product(TRANSFER, threads):
        if wanted(f"{name} transfer") and not (options.quick and not options.only):
            report.add(transfer_rows(made[name], count, 3))


if __name__ == "__main__":
    main()
