"""What the two processes of the quick tests do beside training in each way; ways.py runs these by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.training.cloud.parallel.trainings import Stop, facts, run


def moved(folder: str) -> dict[str, Any]:
    """Go on from what one process wrote, and stop for one process to go on."""
    resumed = run("fsdp", "fsdp", checkpoint=f"{folder}/one", decay="matrices", accumulate=4)
    run("fsdp", "fsdp", checkpoint=f"{folder}/two", callbacks=[Stop(8)], decay="matrices", accumulate=4)
    return facts(resumed)


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {"moved": moved}
