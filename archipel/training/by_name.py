"""Losses, optimizers and schedules by name, as files of settings have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from archipel.errors import PreprocessingError, TrainingError
from archipel.training import losses, optimizers, schedules
from archipel.training.arguments import check_part, whole
from archipel.training.losses import LOSS_METHODS, Loss
from archipel.training.optimizers import OPTIMIZER_METHODS, Optimizer
from archipel.training.schedules import Schedule

Maker = Callable[..., Any]

LOSSES: dict[str, Maker] = {
    make.__name__: make
    for make in (
        losses.cross_entropy, losses.binary_cross_entropy, losses.mse, losses.l1, losses.huber, losses.kl_divergence
    )
}  # fmt: skip
OPTIMIZERS: dict[str, Maker] = {
    make.__name__: make
    for make in (optimizers.sgd, optimizers.adam, optimizers.adamw, optimizers.adagrad, optimizers.rmsprop)
}
SCHEDULES: dict[str, Maker] = {
    make.__name__: make
    for make in (
        schedules.constant, schedules.step_decay, schedules.exponential, schedules.linear, schedules.polynomial,
        schedules.cosine, schedules.one_cycle,
    )
}  # fmt: skip


def make_loss(value: object, key: str = "loss") -> Loss:
    """A loss from its name or table; a loss itself stays what it is. Raises TrainingError that names `key`."""
    if isinstance(value, str | Mapping):
        value = make_named(LOSSES, value, key)
    check_part(key, "losses", value, LOSS_METHODS)
    return value  # type: ignore[return-value]


def make_optimizer(value: object, schedule: object, steps: int | None, key: str = "optimizer") -> Optimizer:
    """An optimizer from its name or table, with the schedule as its rate.

    Arguments:
        value: a name, a table or an optimizer.
        schedule: a name, a table, a schedule, or None for a constant rate.
        steps: the updates of the whole training, for a schedule that does not say how long it is.
        key: what errors call it.

    Raises TrainingError that names the key.
    """
    if schedule is not None:
        if not isinstance(value, str | Mapping):
            raise TrainingError(
                "schedule: the optimizer is an object, which has its schedule as its lr: optimizers.sgd(lr=schedules."
                "cosine(0.1, steps=500)); leave schedule out, or give the optimizer by name"
            )
        table = _table(value, "optimizer")
        table["lr"] = make_schedule(schedule, _rate(table), steps)
        value = table
    if isinstance(value, str | Mapping):
        value = make_named(OPTIMIZERS, value, key)
    check_part(key, "optimizers", value, OPTIMIZER_METHODS)
    return value  # type: ignore[return-value]


def make_schedule(value: object, rate: float, steps: int | None) -> Schedule:
    """A schedule from its name or table; `rate` is its highest rate, `steps` its length where it has none."""
    if isinstance(value, Schedule):
        return value
    if not isinstance(value, str | Mapping):
        raise TrainingError(f"schedule: expected a name, a table or one of training.schedules, got {value!r}")
    table = _table(value, "schedule")
    warmup = whole("schedule", "warmup", table.pop("warmup", 0), 0)
    maker = _find(SCHEDULES, table["name"], "schedule")
    if "steps" in inspect.signature(maker).parameters and "steps" not in table:
        if steps is None:
            raise TrainingError("schedule: the data have no known length; give the schedule's `steps`")
        table["steps"] = max(steps - warmup, 1)
    result: Schedule = make_named(SCHEDULES, {**table, "lr": rate}, "schedule")
    return schedules.warmup(result, warmup) if warmup else result


def make_named(makers: Mapping[str, Maker], value: str | Mapping[str, Any], key: str) -> Any:
    """What the maker with the value's name makes of its other entries. Raises TrainingError that names `key`."""
    table = _table(value, key)
    name = table.pop("name")
    maker = _find(makers, name, key)
    known = list(inspect.signature(maker).parameters)
    for argument in table:
        if argument not in known:
            raise TrainingError(f"{key}.{argument}: {name} has no such argument; it has {', '.join(known) or 'none'}")
    try:
        return maker(**table)
    except (TypeError, TrainingError, PreprocessingError) as error:
        raise TrainingError(f"{key}: {error}") from None


def _table(value: str | Mapping[str, Any], key: str) -> dict[str, Any]:
    table = {"name": value} if isinstance(value, str) else dict(value)
    if not isinstance(table.get("name"), str):
        raise TrainingError(f"{key}: a table needs a name, such as {{ name = ... }}; it has {sorted(map(str, table))}")
    return table


def _find(makers: Mapping[str, Maker], name: str, key: str) -> Maker:
    if name in makers:
        return makers[name]
    near = get_close_matches(name, makers, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise TrainingError(f"{key}: no {name!r}; there are {', '.join(makers)}{hint}")


def _rate(table: Mapping[str, Any]) -> float:
    """The rate of an optimizer's table, or the optimizer's default."""
    maker = _find(OPTIMIZERS, table["name"], "optimizer")
    rate = table.get("lr", inspect.signature(maker).parameters["lr"].default)
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TrainingError(f"optimizer.lr: must be a number where there is a schedule, is {rate!r}")
    return float(rate)
