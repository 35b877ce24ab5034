"""`archipel convert` offers every loss and optimizer that there is."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType

import pytest

from archipel.cli.models.convert import LOSSES, OPTIMIZERS
from archipel.training import losses, optimizers


def makers(module: ModuleType) -> set[str]:
    """Public functions of the module that give one of its own dataclasses, and can be called without arguments."""
    names = set()
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if name.startswith("_") or function.__module__ != module.__name__:
            continue
        made = inspect.get_annotations(function, eval_str=True).get("return")
        if dataclasses.is_dataclass(made):
            names.add(name)
    return names


@pytest.mark.parametrize(("module", "offered"), [(losses, LOSSES), (optimizers, OPTIMIZERS)])
def test_all_are_offered(module: ModuleType, offered: tuple[str, ...]) -> None:
    assert set(offered) == makers(module), "complete LOSSES and OPTIMIZERS in archipel/cli/models/convert.py"
