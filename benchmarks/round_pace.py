"""How long a secure round of 8 local devices takes with the default `retry_after`, beside devices that ask every 0.2 s.

Server and devices are on this machine, the model is small, so almost all of a round is waiting: for a device to ask
again, in each of a round's phases. The time of a round is from the end of one to the end of the next.

    python benchmarks/round_pace.py
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from agent_federation import Federation, agents, flat_bundle
from measure import Report, Row, arguments

from archipel.operator import TaskRequest

DEVICES, OFTEN = 8, 0.2


def main() -> None:
    options = arguments(__doc__).parse_args()
    count = 4 if options.quick else 12
    report = Report(options.json)
    ours = [seconds(None, count, privacy) for privacy in ("secure", "plain")]
    often = [seconds(OFTEN, count, privacy) for privacy in ("secure", "plain")]
    report.add(
        Row("round_pace", f"{DEVICES} devices, {privacy}", a, b, f"retry_after {OFTEN:g}", a / b, "s")
        for privacy, a, b in zip(("secure", "plain"), ours, often)
    )


def seconds(retry_after: float | None, count: int, privacy: str) -> float:
    """Median seconds of a round, with the default for None."""
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), 2.0 if retry_after is None else retry_after)
        bundle = flat_bundle(Path(folder) / "flat", 1000, federation.publisher)
        with federation.serving() as operator:
            folders = {federation.enrolled(f"device-{number}"): federation.url for number in range(DEVICES)}
            with agents(folders, {"x": np.full(8, 0.01, np.float32)}):
                task = operator.tasks.create(
                    TaskRequest(
                        name="rounds", population="devices", bundle=operator.bundles.upload(bundle).digest,
                        rounds=count, min_cohort=DEVICES, cohort=DEVICES, privacy=privacy,
                    )  # type: ignore[arg-type]
                )  # fmt: skip
                operator.tasks.wait(task.task_id, timeout=600, poll=0.1)
                made = [each for each in operator.tasks.rounds(task.task_id) if each.phase == "committed"]
        ends = [each.ended for each in made if each.ended is not None]
        return statistics.median(after - before for before, after in pairwise(ends))


if __name__ == "__main__":
    main()
