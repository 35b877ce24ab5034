"""The compression study: everything that docs/results-compression.md says, made by one command.

    python benchmarks/compression/study.py --install-peers      once: NNCF and OpenVINO, about 2 GB
    python benchmarks/compression/study.py                      under 2 hours on 2 quiet cores

Trains the float models (floats.py), applies every recipe to each, distils, compares with other tools side by side, and
writes the page. Stopped at any point it goes on from there: what is finished is kept in --folder, training goes on at
the step where it was. --only NAME takes one model (can be repeated), --quick the cheapest one without training.

Only latency minds what else runs on the machine, so it can be measured apart:

    python benchmarks/compression/study.py --stage accuracy     everything else; no page
    python benchmarks/compression/study.py --stage latency      minutes; stops where an accuracy is missing; the page
    python benchmarks/compression/study.py --stage page         the page alone, of what is kept
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import beside
import openvino_peer
import torch
from cases import CASES
from cells import Cells, Missing
from distillation import TEACHER, distillation
from floats import DATA, FOLDER, trained
from lite_peers import PeerError
from operators import by_operator
from report import Operators, Study, markdown
from schemes import Failure, made, results
from side_by_side import LATENCY_GOAL, Rows, rows, side_by_side
from subjects import Subject
from ways import OURS

PAGE = beside.ROOT / "docs" / "results-compression.md"
QUICK = "digits-cnn"
QUICK_EXAMPLES = 1000
STAGES = ("all", "accuracy", "latency", "page")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="what is kept (default %(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of all data sets (default %(default)s)")
    parser.add_argument("--peers", type=Path, help="the peers' environments (default: peers beside --folder)")
    parser.add_argument("--out", type=Path, help=f"the page (default {PAGE}; with --quick or --only standard output)")
    parser.add_argument("--only", action="append", choices=CASES, help="only this model; can be repeated")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} alone, one seed, no training but the float's")
    parser.add_argument("--stage", choices=STAGES, default="all", help="what may be made now (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a result on standard output, nothing else")
    parser.add_argument("--install-peers", action="store_true", help="make the peers' environment, and end")
    options = parser.parse_args()
    peers = options.peers or options.folder.parent / "peers"
    if options.install_peers:
        return _install(peers)
    if not options.data.is_dir():
        parser.error(f"--data {options.data}: no such folder; it holds the data sets of archipel.datasets")
    options.folder.mkdir(parents=True, exist_ok=True)
    # Latency has cells of its own, so it may be measured while accuracies of other models are being made.
    name = "lock-latency" if options.stage in ("latency", "page") else "lock"
    alone = open(options.folder / name, "w")  # noqa: SIM115 - held until the process ends
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.error(f"--folder {options.folder}: another study is at work there; wait for it or choose another folder")
    torch.set_num_threads(2)
    names = [QUICK] if options.quick else options.only or list(CASES)
    try:
        study = run(options.folder, options.data, peers, names, options.quick, options.stage)
    except Missing as missing:
        parser.error(f"--stage {options.stage}: {missing} is not there yet; run the stages before it")
    if options.stage == "accuracy":
        return 0
    if options.json:
        _print_json(study)
    page = markdown(study)
    out = options.out or (None if options.quick or options.only else PAGE)
    if out is not None:
        out.write_text(page, encoding="utf-8")
    elif not options.json:
        print(page)
    return 0


def run(folder: Path, data: Path, peers: Path, names: Sequence[str], quick: bool, stage: str) -> Study:
    """The whole study, or that of these models; "accuracy" ends before the first latency. Raises Missing."""
    suffix = "-quick" if quick else ""
    cells = Cells(folder / f"cells{suffix}", say, make=stage in ("all", "accuracy"))
    times = Cells(folder / f"latency{suffix}", say, make=stage in ("all", "latency"))
    study = Study(accuracy_stamps=cells.stamps, latency_stamps=times.stamps)
    for name in names:
        seeds = CASES[name].seeds[:1] if quick else CASES[name].seeds
        study.floats += [trained(name, seed, folder, data) for seed in seeds]
        subjects = [Subject(name, seed, folder, data, QUICK_EXAMPLES if quick else None) for seed in seeds]
        found, failures = made(subjects, cells, quick)
        compared = rows(subjects[0], cells, peers)
        if name == TEACHER and not quick:
            study.distillations.append(distillation(subjects[0], cells))
        if stage == "accuracy":
            continue
        study.results += [*results(subjects, found, times, quick), *failures]
        table = side_by_side(subjects[0], compared, times, peers, quick)
        study.tables.append(table)
        if table.ours.latency[1].ratio > LATENCY_GOAL:
            study.operators[table.title] = _operators(subjects[0], compared, times)
    return study


def _operators(subject: Subject, compared: Rows, times: Cells) -> Operators:
    """Microseconds by operator, of the float model and of ours in int8."""
    chosen = [row.facts for row in compared.rows if row.tool == OURS and row.chosen]
    files = [compared.rows[0].facts, *chosen]
    paths = [subject.made / facts["files"][0] for facts in files]
    key = {"files": [facts["digest"] for facts in files]}
    found = times.get(
        f"{subject.title} operators", key, lambda: {"rows": [by_operator(path, threads=1) for path in paths]}
    )["rows"]
    before, after = ([(name, time) for name, time in each] for each in found)
    return before, after


def _print_json(study: Study) -> None:
    for each in study.floats:
        print(json.dumps({"float": asdict(each)}))
    for result in study.results:
        print(json.dumps({"failure" if isinstance(result, Failure) else "result": asdict(result)}))
    for lift in study.distillations:
        print(json.dumps({"distillation": asdict(lift)}))
    for table in study.tables:
        verdict = table.verdict()
        print(json.dumps({"side_by_side": asdict(table), "verdict": asdict(verdict) if verdict else None}))


def _install(peers: Path) -> int:
    try:
        openvino_peer.install_environment(peers)
    except PeerError as error:
        say(str(error))
        return 1
    return 0


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
