"""How long a round of 8 local devices takes with the server's defaults, beside devices that always ask every 0.2 s, and
beside devices that always ask every 2 s.

Server and devices are on this machine and the model is small, so almost all of a round is waiting: for a device to ask
again, in each of a round's phases. The time of a round is from the end of one to the end of the next, the median.

    python benchmarks/round_pace.py
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from agent_federation import POPULATION, Federation, agents, flat_bundle
from measure import Report, Row, arguments

from archipel.operator import TaskRequest
from archipel.protocol.operator.tasks import Privacy

DEVICES, OURS = 8, "defaults"
SETTINGS: dict[str, dict[str, float]] = {
    OURS: {"retry_after": 2.0},
    "every 0.2 s": {"retry_after": 0.2},
    # So few that no fleet may ask more often than `retry_after` says.
    "every 2 s": {"retry_after": 2.0, "check_ins_per_second": DEVICES / 2.0},
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    count = 4 if options.quick else 12
    report = Report(options.json)
    kinds: tuple[Privacy, ...] = ("secure",) if options.quick else ("secure", "plain")
    for privacy in kinds:
        took = {name: seconds(settings, count, privacy) for name, settings in SETTINGS.items()}
        ours = took.pop(OURS)
        case = f"{DEVICES} devices, {privacy}"
        report.add(Row("round_pace", case, ours, other, name, ours / other, "s") for name, other in took.items())


def seconds(settings: dict[str, float], count: int, privacy: Privacy) -> float:
    """Median seconds of a round, of `count`."""
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), **settings)
        bundle = flat_bundle(Path(folder) / "flat", 1000, federation.publisher)
        with federation.serving() as operator:
            folders = {federation.enrolled(f"device-{number}"): federation.url for number in range(DEVICES)}
            with agents(folders, {"x": np.full(8, 0.01, np.float32)}):
                task = operator.tasks.create(
                    TaskRequest(
                        name="rounds", population=POPULATION, bundle=operator.bundles.upload(bundle).digest,
                        rounds=count, min_cohort=DEVICES, cohort=DEVICES, privacy=privacy,
                    )
                )  # fmt: skip
                operator.tasks.wait(task.task_id, timeout=600, poll=0.1)
                made = [each for each in operator.tasks.rounds(task.task_id) if each.phase == "committed"]
    ends = [each.ended for each in made if each.ended is not None]
    return statistics.median(after - before for before, after in pairwise(ends))


if __name__ == "__main__":
    main()
