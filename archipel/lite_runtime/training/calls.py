"""`fit` and `local_round` as callers write them, for every kind of runtime.

The keywords are named only here: each call checks them once and passes on the arrays, the options as one struct, and
the caller's callbacks and control. (ModelRuntime repeats the signatures; a test compares them.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from archipel.lite_runtime.noise import Randomness
from archipel.lite_runtime.training.control import Control
from archipel.lite_runtime.training.options import FitOptions, RoundOptions, check_options
from archipel.lite_runtime.training.results import Callback, History, LocalUpdate

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class FitData:
    """The arrays of a fit: local data, data to validate with, and tensors that come from a server."""

    x: np.ndarray | Arrays
    y: np.ndarray | None = None
    validation: tuple[np.ndarray | Arrays, np.ndarray | None] | None = None
    broadcast: Arrays | None = None


@dataclass(frozen=True)
class RoundData:
    """The arrays of a local round: local data, the parameters to start from, and tensors that come from the server."""

    x: np.ndarray | Arrays
    y: np.ndarray | None = None
    parameters: Arrays | None = None
    broadcast: Arrays | None = None


@dataclass(frozen=True)
class Hooks:
    """How a caller follows training: functions called after every step, and a control to pause or cancel it."""

    callbacks: Sequence[Callback] = ()
    control: Control | None = None


class Learning(ABC):
    """The public methods of a runtime that train; its `run_fit` and `run_round` do the work."""

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
        """Learn from local data with the bundle's train program; nothing leaves the device.

        Arguments:
            x: `[examples, ...]` with the dtype and shape of the program's example field; where it has several fields,
                a mapping from field name to such arrays, which may hold the labels too.
            y: `[examples, ...]`, the program's label field.
            epochs: passes over all examples, at least 1.
            batch_size: examples for one step, at least 1; a graph made for batches of a fixed size takes only that.
            shuffle: whether every pass has an order of its own.
            seed: 0 to 2**32 - 1; determines the order and all random numbers in the program.
            hyperparameters: values by name, such as `{"lr": 0.01}`, within the bounds that the bundle declares.
            validation: `(x, y)`, with which the model is evaluated after every pass.
            callbacks: functions that get a Progress after every step; training ends after one that returns True.
            program: the name of a train program, needed where the bundle has several.
            moves: names of the parameters and personal tensors that change; None: all that the program writes.
            broadcast: tensors by name that a server would send, if the program reads any.
            checkpoint: a file, written every `checkpoint_every` seconds and at the end. After an interruption, the same
                call continues from it, with the result of an uninterrupted run.
            control: pauses and cancels the fit from another thread or a signal handler.
            feature_cache: compute the outputs of a frozen backbone once per example, if the bundle has `features`.

        Returns the losses and metrics of every step and the metrics of every validation.

        Raises RuntimeInputError, CheckpointError, or NonFiniteLossError, after which the runtime has the last weights
        with a finite loss. Any other error, also of a callback, leaves the runtime as it was.

        Example:
            history = runtime.fit(x, y, epochs=3, batch_size=16, hyperparameters={"lr": 0.05})
            print(history.losses[0], "->", history.losses[-1])
        """
        given = {
            "epochs": epochs, "batch_size": batch_size, "shuffle": shuffle, "seed": seed,
            "hyperparameters": hyperparameters or {}, "program": program, "moves": moves, "checkpoint": checkpoint,
            "checkpoint_every": checkpoint_every, "feature_cache": feature_cache,
        }  # fmt: skip
        options = check_options(FitOptions, "fit", given)
        return self.run_fit(FitData(x, y, validation, broadcast), options, Hooks(callbacks, control))

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
        """One device's part of a federated round: `begin`, the bundle's schedule, `finish`.

        The runtime's own parameters do not change; its `state` changes only when the round is complete.

        Arguments:
            x: `[examples, ...]`, or a mapping from field name to such arrays, as in `fit`.
            y: `[examples, ...]`, the programs' label field.
            seed: 0 to 2**32 - 1; determines the order and all random numbers but `noise`.
            parameters: all parameters by name, from which the round starts; None: the present ones.
            broadcast: tensors by name that the server sends with the round.
            hyperparameters: values by name, within the bounds that the bundle declares.
            callbacks: functions that get a Progress after every step.
            randomness: the source of `noise`; None: the operating system. Only for a runtime in this process.

        Returns the arrays to upload, with the examples, steps, metrics and losses of the round.

        Raises RuntimeInputError, NonFiniteLossError, RuntimeProgramError, or what a callback raises; a callback that
        returns True raises RuntimeInputError.

        Example:
            update = runtime.local_round(x, y, seed=7, hyperparameters={"lr": 0.05})
            print(update.examples, update.losses[-1])
        """
        options = check_options(RoundOptions, "local_round", {"seed": seed, "hyperparameters": hyperparameters or {}})
        return self.run_round(RoundData(x, y, parameters, broadcast), options, Hooks(callbacks), randomness)

    @abstractmethod
    def run_fit(self, data: FitData, options: FitOptions, hooks: Hooks) -> History:
        """Do the work of `fit`, with checked options."""

    @abstractmethod
    def run_round(
        self, data: RoundData, options: RoundOptions, hooks: Hooks, randomness: Randomness | None = None
    ) -> LocalUpdate:
        """Do the work of `local_round`, with checked options."""
