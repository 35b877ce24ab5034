"""What every session offers: one program's graph, opened by one inference engine and ready to run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from archipel.lite_runtime.engines.delegates import ProgramPlacement, Skipped

Arrays = Mapping[str, np.ndarray]


class ProgramSession(ABC):
    """One program's graph, ready to run. `native` is the engine's own object."""

    name: str
    native: Any
    inputs: frozenset[str]
    """The names of the graph's inputs."""
    outputs: frozenset[str]

    @abstractmethod
    def run(self, outputs: Sequence[str], feed: Mapping[str, Any]) -> list[np.ndarray]:
        """Feed arrays (or what `value` made of them), get new arrays in the order of `outputs`.

        Raises RuntimeProgramError.
        """

    @abstractmethod
    def bind(
        self,
        inputs: Arrays,
        outputs: Arrays,
        bound: dict[int, Any] | None = None,
        kept: Collection[str] = (),
    ) -> Callable[[], None]:
        """A function that runs the graph on these buffers: it reads `inputs` and writes `outputs`, all C-contiguous.

        `bound` keeps what an engine makes of an array, by the array's id, for further calls with the same arrays; who
        gives it keeps the arrays as long. It copies nothing but inputs that are read-only, and those once. `kept` names
        the inputs and outputs that the caller changes and reads only by way of `send` and `fetch`, so that an engine
        can hold them on its device meanwhile. Raises RuntimeProgramError.
        """

    holds: bool = False
    """Whether it holds what `bind` calls kept in memory of its own. Then sessions of other engines cannot go on with
    the arrays of `bound`."""

    def fetch(self, arrays: Iterable[np.ndarray], bound: dict[int, Any]) -> None:  # noqa: B027
        """Write what runs have made of these kept arrays into them, where it is not in them already."""

    def send(self, arrays: Iterable[np.ndarray], bound: dict[int, Any]) -> None:  # noqa: B027
        """Let the next run read the present content of these kept arrays."""

    @abstractmethod
    def value(self, array: np.ndarray) -> Any:
        """What stands for `array`, which does not change any more, in many calls of `run`."""

    @abstractmethod
    def placement(self) -> ProgramPlacement:
        """Which delegate has which node."""

    def skipped(self) -> Sequence[Skipped]:
        """Delegates that this session has left out since it was opened, and why."""
        return ()
