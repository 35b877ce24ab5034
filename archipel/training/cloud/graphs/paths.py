"""Where in a module the parameters of a graph lie: below their own names, with a module for each dot.

Names come from files, and PyTorch writes the paths of a module into the Python code that it runs. So a path has no
character that could end a string there, and no part that is a module's own attribute.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

# What could end a string literal, or a line.
_UNSAFE = re.compile(r"[\"'\\\x00-\x1f\x7f-\x9f\u2028\u2029]")


def module_paths(names: Iterable[str], kind: type[nn.Module], reserved: Collection[str] = ()) -> dict[str, str]:
    """The path of each parameter.

    Arguments:
        names: of the parameters.
        kind: the module's class, whose attributes no parameter may hide.
        reserved: further attributes of the module.
    """
    paths: dict[str, str] = {}
    root = nn.Module()
    for name in names:
        at: Any = root
        *parents, last = (_UNSAFE.sub("_", part) or "_" for part in name.split("."))
        path = []
        for part in parents:
            while not _is_free(at, part, at is root, kind, reserved) and not _is_module(at, part):
                part += "_"
            path.append(part)
            if not _is_module(at, part):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        while not _is_free(at, last, at is root, kind, reserved):
            last += "_"
        at.register_buffer(last, torch.empty(0))
        paths[name] = ".".join([*path, last])
    return paths


def has(root: nn.Module, path: str) -> bool:
    at: Any = root
    for part in path.split("."):
        if not hasattr(at, part):
            return False
        at = getattr(at, part)
    return True


def find(root: nn.Module, path: str) -> Any:
    """The parameter, buffer or module at a path. Raises AttributeError."""
    at: Any = root
    for part in path.split("."):
        at = getattr(at, part)
    return at


def install(root: nn.Module, path: str, content: Any) -> None:
    """Give a module a parameter, buffer or module at a path, with modules on the way."""
    *parents, last = path.split(".")
    at = root
    for part in parents:
        if not hasattr(at, part):
            at.add_module(part, nn.Module())
        at = getattr(at, part)
    if isinstance(content, nn.Parameter):
        at.register_parameter(last, content)
    elif isinstance(content, torch.Tensor):
        at.register_buffer(last, content)
    else:
        at.add_module(last, content)


def _is_free(at: nn.Module, part: str, top: bool, kind: type[nn.Module], reserved: Collection[str]) -> bool:
    return not hasattr(at, part) and not (top and (hasattr(kind, part) or part in reserved))


def _is_module(at: nn.Module, part: str) -> bool:
    return part in at._modules
