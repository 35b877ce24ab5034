"""`archipel convert` offers every loss, optimizer, schedule and transform that there is."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import ModuleType

import pytest

from archipel.cli.models.convert.training_options import SCHEDULES, TRANSFORMS
from archipel.training import losses, optimizers, schedules, transforms
from archipel.training.by_name import LOSSES, OPTIMIZERS


def makers(module: ModuleType) -> set[str]:
    """Public functions of the module that give one of its own dataclasses."""
    names = set()
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if name.startswith("_") or function.__module__ != module.__name__:
            continue
        made = inspect.get_annotations(function, eval_str=True).get("return")
        if dataclasses.is_dataclass(made):
            names.add(name)
    return names


@pytest.mark.parametrize(
    ("module", "offered", "left_out"),
    [
        (losses, LOSSES, set()),
        (optimizers, OPTIMIZERS, set()),
        (schedules, SCHEDULES, set()),
        (transforms, TRANSFORMS, {"correction"}),  # reads what the `begin` of scaffold makes, which adds it itself
    ],
)
def test_all_are_offered(module: ModuleType, offered: Mapping[str, object], left_out: set[str]) -> None:
    assert set(offered) | left_out == makers(module), "complete archipel/cli/models/convert/training_options.py"
