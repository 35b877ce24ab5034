"""Simulated federations: archipel beside pfl-research, Flower and loops by hand; seconds, memory of all processes.

| row | what |
|---|---|
| LR-MNIST | logistic regression on MNIST: 1,000 clients, 10 a round, batches of 10, one local epoch, 100 rounds |
| FedAvg CNN | the CNN of McMahan et al. 2017 on MNIST: 100 clients, 10 a round, batches of 10, one epoch, 10 rounds |
| population | 1,000 drawn clients a round of 10^4, 10^5 and 10^6: seconds a round, memory; 100 of 10^6 for comparison |

Data and the converted model are loaded before; what is timed includes sessions, workers and sums, and no evaluation.
Each side runs in an environment and, each time, in a process of its own, one after the other. Memory is the largest PSS
of all its processes in a run that is not timed. "accuracy" (of 2,000 test pictures) says that all sides learn the same.

    python benchmarks/simulate.py --install-peers     once: environments with pfl-research and Flower
    python benchmarks/simulate.py                     all rows, 3 runs of each side (an hour)
    python benchmarks/simulate.py --quick             a tenth of the rounds, once
    python benchmarks/simulate.py --only LR-MNIST --without Flower
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lite_peers import DEFAULT_FOLDER, PeerError, clean_environment, install, python_of
from measure import Report, Row, arguments, print_alone
from server_load import memory

sys.path.append(str(Path(__file__).parent / "simulation"))
from tasks import TASKS, Task

HERE = Path(__file__).parent / "simulation"
DATA = Path(__file__).parents[2] / "shared" / "data" / "mnist_by_writer"
OURS = "archipel"
PACKAGES = {
    "pfl": ("pfl==0.6.0", "torch==2.13.0", "numpy"),
    "flower-simulation": ("flwr[simulation]==1.42.0", "torch==2.13.0", "numpy"),
}
SIDES = {
    # What rows call it: script, environment ("" is this one's).
    OURS: ("run_archipel.py", ""),
    "PyTorch loop": ("run_torch.py", ""),
    "NumPy loop": ("run_numpy.py", ""),
    "pfl-research": ("run_pfl.py", "pfl"),
    "Flower": ("run_flower.py", "flower-simulation"),
}
POPULATION = "population"
SAMPLED = 0.05
"""Seconds between two looks at the memory."""


def main() -> None:
    options = parsed()
    if options.install_peers:
        for environment, packages in PACKAGES.items():
            install(options.peers, environment, packages)
        return
    report = Report(options.json, ("numpy", "onnxruntime", "torch"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, task in TASKS.items():
            if options.only in (None, task.name):
                write_files(folder, task)
                compare_sides(name, task, folder, options, report)
        if options.only in (None, POPULATION):
            run_population(options)


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    names = [*(task.name for task in TASKS.values()), POPULATION]
    parser.add_argument("--only", choices=names, help="one row")
    parser.add_argument("--without", action="append", default=[], choices=[*SIDES][1:], help="leave a side out")
    parser.add_argument("--runs", type=int, default=3, help="of each side (%(default)s)")
    parser.add_argument(
        "--processor-time", action="store_true",
        help="processor seconds of all processes, for a machine that others use too; says nothing of Flower, whose "
        "workers are not its children",
    )  # fmt: skip
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments")
    parser.add_argument("--install-peers", action="store_true")
    return parser.parse_args()


def write_files(folder: Path, task: Task) -> None:
    """The data for all sides, and the task as a bundle. In a process of its own, so that this one stays small."""
    command = [sys.executable, HERE / "write_files.py", str(DATA), str(folder), task.name]
    subprocess.run(command, check=True)


def compare_sides(name: str, task: Task, folder: Path, options: argparse.Namespace, report: Report) -> None:
    rounds = max(1, task.rounds // 10) if options.quick else task.rounds
    sides = {side: found for side in SIDES if (found := python(side, task, options)) is not None}
    found: dict[str, list[Outcome]] = {side: [] for side in sides}
    for run in range((1 if options.quick else options.runs) + 1):
        for side, command in sides.items():
            # The first run of each is for its memory, and brings files into the system's cache.
            found[side].append(
                run_side(command, name, rounds, folder, watched=run == 0, processor=options.processor_time)
            )
    seconds = {side: [outcome.seconds for outcome in outcomes[1:]] for side, outcomes in found.items()}
    for side, outcomes in found.items():
        print(f"{task.name}, {rounds} rounds, {side}: accuracy {outcomes[-1].accuracy:.3f}", file=sys.stderr)
        if side == OURS:
            continue
        ours, peer = statistics.median(seconds[OURS]), statistics.median(seconds[side])
        ratio = statistics.median(a / b for a, b in zip(seconds[OURS], seconds[side]))
        report.add([Row("simulate", task.name, ours, peer, side, ratio, "s")])
        ours, peer = found[OURS][0].memory, outcomes[0].memory
        report.add([Row("simulate", f"{task.name}, memory", ours, peer, side, ours / peer, "MB")])


def python(side: str, task: Task, options: argparse.Namespace) -> list[str] | None:
    """The command of a side; None where it does not take part, with a line that says why."""
    script, environment = SIDES[side]
    if side in options.without or (side == "NumPy loop" and task.name != TASKS["lr"].name):
        return None
    try:
        found = python_of(options.peers, environment, "benchmarks/simulate.py") if environment else sys.executable
    except PeerError as error:
        print(f"without {side}: {error}", file=sys.stderr)
        return None
    return [str(found), str(HERE / script)]


@dataclass(frozen=True)
class Outcome:
    seconds: float
    memory: float
    accuracy: float


def run_side(command: list[str], name: str, rounds: int, folder: Path, *, watched: bool, processor: bool) -> Outcome:
    """One run in a process of its own. Raises PeerError where it ends before its answer."""
    answers, its_end = os.pipe()
    log = folder / "side.log"
    with log.open("w") as messages:
        own = command[0] == sys.executable
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])} if own else clean_environment()
        process = subprocess.Popen(
            [*command, name, str(rounds), str(folder), str(its_end)], stdin=subprocess.PIPE, stdout=messages,
            stderr=messages, text=True, pass_fds=[its_end], env=environment,
        )  # fmt: skip
    os.close(its_end)
    assert process.stdin is not None
    most, over = [0.0], threading.Event()

    def watch() -> None:
        most[0] = memory(process.pid)
        while not over.wait(SAMPLED):
            most[0] = max(most[0], memory(process.pid))

    with os.fdopen(answers) as lines:
        if lines.readline() != "ready\n":
            raise PeerError(f"{command[1]} ended: {' '.join(log.read_text(errors='replace').split())[-300:]}")
        watcher = threading.Thread(target=watch)
        if watched:
            watcher.start()
        process.stdin.write("\n")
        process.stdin.flush()
        done = lines.readline()
        over.set()
        answer = lines.readline()
    if watched:
        watcher.join()
    process.stdin.close()
    process.wait()
    if not done or not answer:
        raise PeerError(f"{command[1]} ended: {' '.join(log.read_text(errors='replace').split())[-300:]}")
    told: dict[str, Any] = json.loads(answer)
    return Outcome(told["processor" if processor else "seconds"], most[0] * 1.048576, told["accuracy"])


def run_population(options: argparse.Namespace) -> None:
    for population, cohort in ((10**4, 1000), (10**5, 1000), (10**6, 1000), (10**6, 100)):
        command = [sys.executable, str(HERE / "population.py"), str(population), str(cohort)]
        rounds = [
            json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
        ]
        case = f"{POPULATION}: {cohort} of {population}"
        seconds, most = float(np.median([each["seconds"] for each in rounds])), rounds[-1]["memory"]
        if options.json:
            print_alone("simulate", case, s_a_round=seconds, MB=most)
        else:
            print(f"{case:<36} {seconds:.3f} s a round, {most:.0f} MB")


if __name__ == "__main__":
    main()
