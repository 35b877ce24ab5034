"""How rounds go, as operators are told of it: numbers of devices, bytes and seconds by phase, and who is missing."""

from archipel.server.rounds.progress.results import means_by_name, spread_by_name
from archipel.server.rounds.progress.tasks import task_progress

__all__ = ["means_by_name", "spread_by_name", "task_progress"]
