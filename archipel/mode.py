"""How graphs run: as a whole, or node by node for whoever looks for a fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Mode = Literal["graph", "eager"]

_mode: Mode = "graph"


def set_mode(mode: Mode) -> None:
    """Choose how graphs run in this process, from the next call on.

    Arguments:
        mode: "graph" runs a graph as a whole, and lets `archipel.train` compile it with `torch.compile` where its
            configuration asks for that. "eager" runs it node by node on PyTorch (extra `cloud`): an error says which
            node it came from, and the first NaN, in a result or in a gradient, raises NotANumberError with the node's
            name. It is slower, and computes the same. It holds for every `TorchModule`, and for bundles that are loaded
            and step runners that are made in this mode, whatever engine they are told.

    Raises ValueError for another mode.

    Example:
        archipel.set_mode("eager")
        module(torch.ones(2, 4))  # stops at the first NaN
    """
    global _mode
    if mode not in get_args(Mode):
        raise ValueError(f"the mode must be 'graph' or 'eager', is {mode!r}")
    _mode = mode


def get_mode() -> Mode:
    """How graphs run in this process: "graph" unless `set_mode` has said otherwise.

    Example:
        assert archipel.get_mode() == "graph"
    """
    return _mode


@contextmanager
def in_mode(mode: Mode) -> Iterator[None]:
    """Run graphs so in the `with` block, and as before behind it."""
    before = get_mode()
    set_mode(mode)
    try:
        yield
    finally:
        set_mode(before)
