"""The registry of engines: what runs whole programs beside ONNX Runtime.

The runtime looks engines up. PyTorch's is in `training.cloud`, a package above the runtime, so the table is here, below
both. The top-level package, which knows all packages, fills it (archipel/__init__.py) with functions that import an
engine when it is first asked for: a device has no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from archipel.errors import MissingExtraError


class Refusal(Exception):
    """An engine cannot run a graph, or would answer otherwise than ONNX Runtime; the text says why."""


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        package: the Python package that must be installed.
        extra: the extra of archipel that installs it.
        load: imports the engine; returns the function that opens a program: (name, path of the graph, threads, options,
            initializers) -> ProgramSession, a type that this file cannot name. Both raise Refusal.
        fixed_bytes: the private memory of a process in which it runs, beside what it takes for each session.
        session_bytes: what it takes for each session of a program, beside its arrays and the stacks of threads.
    """

    package: str
    extra: str
    load: Callable[[], Callable[..., Any]]
    fixed_bytes: int = 0
    session_bytes: int = 0

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None

    def require(self) -> None:
        """Raises MissingExtraError where it is not installed."""
        if not self.installed:
            raise MissingExtraError(self.package, self.extra)


ENGINES: dict[str, Engine] = {}
"""By the name that delegates have."""
