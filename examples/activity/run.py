"""Thirty real people end to end: a cloud model, secure rounds on everybody's phone, everybody's own model.

    python examples/activity/run.py ../shared/data/hapt_har [--rounds 12] [--seeds 3] [--quick] [--out activity]

Writes report.md, results.json and people.png to the folder OUT and prints the report. README.md says what it means.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from experiment import Options, run
from origin import origin
from plot import draw_people
from results import Results, report

from archipel.errors import ArchipelError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with hapt_raw.npz")
    parser.add_argument("--rounds", type=int, default=12, help="secure rounds of a seed (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="experiments with other volunteers (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one seed, three rounds")
    parser.add_argument("--out", type=Path, default=Path("activity"), help="where results go (default %(default)s)")
    options = parser.parse_args()
    if options.rounds < 1 or options.seeds < 1:
        parser.error("--rounds and --seeds: expected at least 1")
    rounds, seeds = (3, 1) if options.quick else (options.rounds, options.seeds)
    # So that `kill` ends the other processes in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, terminate)
    runs, made = [], origin()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for seed in range(seeds):
            with tempfile.TemporaryDirectory(prefix="archipel-activity-") as folder:
                say(f"seed {seed}")
                runs.append(run(Options(options.data, rounds, seed=seed), Path(folder), say))
    except (ArchipelError, OSError) as error:
        print(f"activity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("activity: interrupted", file=sys.stderr)
        return 130
    results = Results(made, runs)
    text = report(results)
    (options.out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    (options.out / "report.md").write_text(text)
    draw_people(runs, options.out / "people.png")
    print(text)
    return 0


def terminate(number: int, frame: object) -> None:
    sys.exit(128 + number)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
