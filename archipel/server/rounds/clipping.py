"""The clip of a training's next round: what the rounds before it say about how many updates the last one clipped."""

from __future__ import annotations

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.bundle import Manifest
from archipel.protocol.metrics.training_metrics import UPDATE_CLIP
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.uploads import clip_input, upload_program
from archipel.server.database.tables import Round, Task
from archipel.server.database.task_requests import read_plan
from archipel.strategies.clipping import next_clip


def adapted_clip(session: Session, task: Task, request: TaskRequest, manifest: Manifest) -> dict[str, float]:
    """The hyperparameters that the server adds to those of the task: the clip, where it adapts it, else none.

    It follows from the last committed round alone, so it is the same after a kill.
    """
    # Updates of an asynchronous task may be summed with those of other rounds, and checked by one clip.
    if task.kind != "training" or request.mode == "asynchronous" or UPDATE_CLIP in request.hyperparameters:
        return {}
    port = clip_input(upload_program(manifest, "training"))
    if port is None:
        return {}
    query = select(Round).where(
        Round.task_id == task.task_id, Round.phase == "committed", Round.weights_out.is_not(None)
    )
    last = session.scalar(query.order_by(Round.number.desc()).limit(1))
    result = None if last is None or last.result is None else msgspec.convert(last.result, RoundResult)
    if last is None or result is None or result.clipped is None:
        return {UPDATE_CLIP: port.default}
    clip = read_plan(last).hyperparameters.get(UPDATE_CLIP, port.default)
    return {UPDATE_CLIP: next_clip(clip, result.clipped, result.devices, port)}
