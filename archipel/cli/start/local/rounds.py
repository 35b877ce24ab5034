"""Follow the rounds of a task of a local federation until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from archipel.cli.start.local.federation import LocalFederation
from archipel.errors import CommandError
from archipel.protocol.operator.tasks import RoundInfo

POLL_SECONDS = 0.3


def ended_rounds(
    federation: LocalFederation, task_id: str, on_open: Callable[[RoundInfo], None] = lambda info: None
) -> Iterator[RoundInfo]:
    """Each round of the task when it has ended, committed or failed; `on_open` is called with those under way.

    Raises CommandError when a device or a process fails, or the task ends without having completed.
    """
    seen = set()
    while True:
        federation.collect_events(timeout=POLL_SECONDS)
        # The task's state is read before its rounds: if it is completed, the list that follows has them all.
        state = federation.operator.tasks.get(task_id)
        for info in federation.operator.tasks.rounds(task_id):
            if info.round_id in seen:
                continue
            if info.phase in ("committed", "failed"):
                seen.add(info.round_id)
                yield info
            else:
                on_open(info)
        if state.state in ("failed", "cancelled"):
            raise CommandError(f"the task ended early ({state.state}): {state.reason}")
        if state.state == "completed":
            break
    # Devices learn of the last commit a little later; these are their last events.
    federation.collect_events(timeout=2 * POLL_SECONDS)


def furthest_phases(rounds: list[RoundInfo]) -> dict[tuple[str, str], str]:
    """The last phase that each device answered in, by device id and round id, as the server has it."""
    return {(part.device_id, info.round_id): part.furthest for info in rounds for part in info.participants}
