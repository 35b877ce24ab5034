"""The interface of every runtime, in this process (Runtime) or in a child process (IsolatedRuntime)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import numpy as np

if TYPE_CHECKING:
    from archipel.bundle import Bundle
    from archipel.lite_runtime.device_state import DeviceState
    from archipel.lite_runtime.noise import Randomness
    from archipel.lite_runtime.training.control import Control
    from archipel.lite_runtime.training.results import Callback, History, LocalUpdate

Arrays = Mapping[str, np.ndarray]


class ModelRuntime(Protocol):
    """The methods that every runtime of a bundle has, with the same arguments, results and errors.

    For functions that take a runtime of either kind. `Runtime` describes the methods. It has two more, `profile` and
    `delegate_report`, which need ONNX Runtime in this process.

    Example:
        def accuracy(runtime: ModelRuntime, x, y):
            return float((runtime.predict(x).argmax(axis=1) == y).mean())

        print(accuracy(load("digits.bundle", trusted), x, y))
    """

    @property
    def bundle(self) -> Bundle:
        """The bundle that was loaded."""
        ...

    @property
    def state(self) -> DeviceState:
        """The device's own tensors: personal ones, and the state that outlives rounds."""
        ...

    @overload
    def predict(self, x: np.ndarray) -> np.ndarray: ...
    @overload
    def predict(self, x: Arrays) -> dict[str, np.ndarray]: ...
    @overload
    def predict(self, x: Iterator[np.ndarray]) -> Iterator[np.ndarray]: ...
    @overload
    def predict(self, x: Iterator[Arrays]) -> Iterator[dict[str, np.ndarray]]: ...
    def predict(self, x: Any) -> Any:
        """The model's answer to a batch, or to each batch of an iterator."""

    def evaluate(
        self, x: np.ndarray | Arrays, y: np.ndarray | None = None, *, batch_size: int = 256
    ) -> dict[str, float]:
        """The model's metrics over all examples."""
        ...

    def analyze(
        self,
        x: np.ndarray | Arrays,
        *,
        program: str = "",
        hyperparameters: Mapping[str, float] | None = None,
        batch_size: int = 256,
    ) -> tuple[dict[str, np.ndarray], int]:
        """The sums of an `analyze` program over all examples, and the number of examples."""
        ...

    def fit(
        self,
        x: np.ndarray | Arrays,
        y: np.ndarray | None = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        hyperparameters: Mapping[str, float] | None = None,
        validation: tuple[np.ndarray | Arrays, np.ndarray | None] | None = None,
        callbacks: Sequence[Callback] = (),
        program: str | None = None,
        moves: Sequence[str] | None = None,
        broadcast: Arrays | None = None,
        checkpoint: Path | str | None = None,
        checkpoint_every: float = 30.0,
        control: Control | None = None,
        feature_cache: bool = True,
    ) -> History:
        """Learn from local data."""
        ...

    def local_round(
        self,
        x: np.ndarray | Arrays,
        y: np.ndarray | None = None,
        *,
        seed: int,
        parameters: Arrays | None = None,
        broadcast: Arrays | None = None,
        hyperparameters: Mapping[str, float] | None = None,
        callbacks: Sequence[Callback] = (),
        randomness: Randomness | None = None,
    ) -> LocalUpdate:
        """Make one device's part of a federated round."""
        ...

    def parameters(self) -> dict[str, np.ndarray]:
        """The present global parameters by name, read-only."""
        ...

    def set_parameters(self, parameters: Arrays) -> None:
        """Replace some or all parameters."""
        ...

    def reset(self, what: Literal["personal", "state", "parameters"]) -> None:
        """Remove the learned tensors of one kind."""
        ...

    def save(self, folder: Path | str) -> None:
        """Write the bundle and what was learned on top of it to a folder that `load` opens."""
        ...

    def restore(self, learned: Arrays) -> None:
        """Restore the tensors that `save` wrote."""
        ...
