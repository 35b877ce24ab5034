"""What was asked for with a stored task."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from archipel.server.models import Task
from archipel.server.resources import TaskRequest

decode_request = lru_cache(maxsize=256)(msgspec.json.Decoder(TaskRequest).decode)
"""From Task.request."""


def request_of(task: Task) -> TaskRequest:
    """The checked request, as `opening.new_task` stored it."""
    return decode_request(task.request)
