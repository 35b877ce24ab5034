"""What PyTorch's exporter lacks for programs with bodies: `torch.cond`, `while_loop`, `scan` and `map`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

_DOMAIN = "pkg.torch"


@contextlib.contextmanager
def one_version_of_bodies() -> Iterator[None]:
    """Let a loop's body hold a branch: the exporter declares two versions of its own domain then, and refuses that."""
    from torch.onnx._internal.exporter import _ir_passes

    original = getattr(_ir_passes, "add_opset_imports", None)
    if original is None:  # another version of PyTorch: such programs are refused by the exporter
        yield
        return

    def add(model: Any) -> None:
        original(model)
        for owner in (model, *model.functions.values()):
            for domain in list(owner.opset_imports):
                if domain.startswith(_DOMAIN):
                    owner.opset_imports[domain] = 1

    setattr(_ir_passes, "add_opset_imports", add)  # noqa: B010 - it has no such field for mypy
    try:
        yield
    finally:
        setattr(_ir_passes, "add_opset_imports", original)  # noqa: B010


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations that the exporter lacks: `map` is a scan that carries nothing."""
    from torch.onnx._internal.exporter._torchlib.ops import hop

    operator = getattr(importlib.import_module("torch._higher_order_ops.map"), "map_impl", None)
    scan = getattr(hop, "higher_order_scan", None)
    if operator is None or scan is None:
        return {}

    def map_impl(body: Any, sequences: Any, others: Any) -> Any:
        return scan(body, (), sequences, others)

    return {operator: map_impl}
