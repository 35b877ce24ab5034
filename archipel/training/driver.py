"""The reference driver: runs a train program in an engine, carrying parameters and state from step to step."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from numbers import Real
from typing import Any

import msgspec
import numpy as np

from archipel.bundle.roles import (
    Broadcast,
    Example,
    ExampleWeight,
    Hyperparameter,
    Label,
    Metric,
    Noise,
    Parameter,
    Personal,
    Port,
    Program,
    Seed,
    Start,
    State,
    Step,
    role_of,
)
from archipel.errors import NotANumberError, RuntimeInputError, TrainingError
from archipel.graph.model import Model
from archipel.lite_runtime.fields import check_array
from archipel.lite_runtime.noise import DiscreteGaussian, Randomness
from archipel.training.arguments import whole
from archipel.training.step_engines import ONNX_RUNTIME, open_engine

Batch = Mapping[str, np.ndarray] | Sequence[np.ndarray]
"""Arrays by field name, or in the order of the program's examples, labels and weights."""

MAX_SEED = 2**32 - 1
_KEPT = (Parameter, Personal, State)


class StepRunner:
    """A train program in an engine, which starts a round: `tensors` has the current parameters and state.

    Inputs of role `start` read the first values, those of role `broadcast` the program's `initial`.

    Arguments:
        step: a train program, such as `step_graph` returns.
        hyperparameters: numbers by name, within the bounds that the program declares; else its defaults.
        seed: of the program's random numbers, such as dropout masks: 0 to 2^32 - 1.
        randomness: the source of bytes for noise.
        engine: "onnxruntime"; "torch" for PyTorch on its best device, or "torch:cpu", "torch:cuda:1" and so on.

    Raises:
        TrainingError: if `step` is no train program, a hyperparameter or the seed is out of bounds, or a tensor has no
            first value.
        MissingExtraError: the engine is not installed.

    Example:
        runner = StepRunner(step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1)))
        metrics = runner.step((x, y))
    """

    def __init__(
        self,
        step: Model,
        hyperparameters: Mapping[str, float] | None = None,
        seed: int = 0,
        randomness: Randomness = secrets.token_bytes,
        engine: str = ONNX_RUNTIME,
    ) -> None:
        if not isinstance(step, Model) or step.kind != "train":
            raise TrainingError("run_steps: expected a train program, such as step_graph returns")
        if whole("run_steps", "seed", seed, 0) > MAX_SEED:
            raise TrainingError(f"run_steps: seed must be from 0 to {MAX_SEED}, is {seed}")
        self._signature = step.program
        self._seed = int(seed)
        self._count = 0
        self._randomness = randomness
        self._samplers: dict[str, DiscreteGaussian] = {}
        self._scalars = _scalars(self._signature, hyperparameters or {})
        self.steps = self._signature.steps
        # In a program of several steps the fields have a first axis of steps, which a batch does not have.
        self._fields = [
            msgspec.structs.replace(p, shape=p.shape[self.steps > 1 :])
            for p in self._signature.inputs
            if isinstance(p, Example | Label | ExampleWeight)
        ]
        self._held: dict[str, Any] = dict(_initial(self._signature, step))  # as the engine takes them
        self._start = dict(self._held)  # `run` replaces what is held, and `start` inputs read these
        self._broadcast = step.initial
        self._engine = open_engine(step, engine)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """The parameters and the state now, by name."""
        return {name: self._engine.array(held) for name, held in self._held.items()}

    def snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """What `tensors` is now, to be read later: until then they stay where the engine has them."""
        held = dict(self._held)
        return lambda: {name: self._engine.array(each) for name, each in held.items()}

    def step(self, batch: Batch) -> dict[str, float]:
        """Run a program of one step and keep the tensors that it writes. Returns the metrics by name."""
        return self.run([batch])[0]

    def run(self, batches: Sequence[Batch]) -> list[dict[str, float]]:
        """Run the program once, on as many minibatches as it takes (`steps`). Returns the metrics of each.

        Raises TrainingError for another number of batches, for wrong fields, and where the program fails.
        """
        if len(batches) != self.steps:
            raise TrainingError(f"run_steps: the program takes {self.steps} batches at once, got {len(batches)}")
        feed = {**self._scalars, **self._stacked([self._batch(batch) for batch in batches])}
        for port in self._signature.inputs:
            if port.name not in feed:
                feed[port.name] = self._read(port)
        outputs = self._signature.outputs
        kept = {port.name for port in outputs if isinstance(port, _KEPT)}
        try:
            results = self._engine.run([port.name for port in outputs], feed, kept)
        except NotANumberError:
            raise  # it says which node
        except TrainingError as error:
            # Engines say that an index is out of bounds, but not where such an index comes from.
            text = str(error)
            outside = any(word in text for word in ("range", "bound"))
            hint = "; labels must be from 0 to classes - 1, other indices within their tables" if outside else ""
            raise TrainingError(f"run_steps: step {self._count} failed: {text}{hint}") from None
        metrics: list[dict[str, float]] = [{} for _ in batches]
        for written, result in zip(outputs, results):
            if isinstance(written, _KEPT):
                self._held[written.tensor] = result
            elif isinstance(written, Metric):
                for values, value in zip(metrics, np.atleast_1d(result)):
                    values[written.name] = float(value)
        self._count += self.steps  # counted only now: a call that failed has changed nothing, and can be made again
        return metrics

    def resume(self, tensors: Mapping[str, np.ndarray], count: int) -> None:
        """Go on after `count` minibatches of a round, with all `tensors` of a runner that made them.

        Raises TrainingError for other tensors.
        """
        if set(tensors) != set(self._held):
            raise TrainingError(f"run_steps: expected the tensors {sorted(self._held)}, got {sorted(tensors)}")
        self._held = dict(tensors)
        self._count = count

    def _read(self, port: Port) -> Any:
        match port:
            case Parameter() | Personal() | State():
                return self._held[port.tensor]
            case Start():
                return self._start[port.tensor]
            case Broadcast() if port.tensor in self._broadcast:
                return np.asarray(self._broadcast[port.tensor], port.dtype)
            case Step():
                return np.asarray(self._count, port.dtype)
            case Seed():
                return np.asarray(self._seed, np.uint32).astype(port.dtype)
            case Noise():
                return self._noise(port)
        raise TrainingError(f"run_steps: no value for {role_of(port)} {port.name!r}")

    def _noise(self, port: Noise) -> np.ndarray:
        if port.distribution != "discrete_gaussian":
            raise TrainingError(f"run_steps: noise {port.name!r} must be discrete_gaussian, is {port.distribution}")
        sampler = self._samplers.get(port.name)  # one sampler for each port: its scale is in it
        if sampler is None:
            sampler = self._samplers[port.name] = DiscreteGaussian(port.scale, self._randomness)
        shape = [int(d) for d in port.shape]
        return sampler.sample(math.prod(shape)).reshape(shape).astype(port.dtype)

    def _batch(self, batch: Batch) -> dict[str, np.ndarray]:
        names = [port.name for port in self._fields]
        if not isinstance(batch, Mapping | Sequence) or isinstance(batch, str):
            raise TrainingError(
                f"run_steps: a batch has the fields {names}, got {type(batch).__name__}; give a list of batches, each "
                "a tuple of arrays or a mapping from field name to array"
            )
        given = dict(batch) if isinstance(batch, Mapping) else dict(zip(names, batch))
        if set(given) != set(names) or (not isinstance(batch, Mapping) and len(batch) != len(names)):
            got = sorted(map(str, given)) if isinstance(batch, Mapping) else f"{len(batch)} arrays"
            raise TrainingError(f"run_steps: a batch has the fields {names}, got {got}")
        # Symbolic sizes by name, with the field that set them: all fields of a batch must agree.
        sizes: dict[str, tuple[int, str]] = {}
        return {port.name: _array(port, given[port.name], sizes) for port in self._fields}

    def _stacked(self, batches: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        if self.steps == 1:
            return batches[0]
        for name, first in batches[0].items():
            sizes = [batch[name].shape for batch in batches]
            if any(size != first.shape for size in sizes):
                raise TrainingError(
                    f"run_steps: {self.steps} batches run in one graph and must have one size, {name!r} has the "
                    f"shapes {sizes}; leave a smaller last batch out, or build the step with steps=1"
                )
        return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def run_steps(
    step: Model,
    batches: Iterable[Batch],
    hyperparameters: Mapping[str, float] | None = None,
    seed: int = 0,
    engine: str = ONNX_RUNTIME,
) -> list[float]:
    """Train from the step's `initial` values, one step for each batch.

    Arguments:
        step: a train program, such as `step_graph` returns.
        batches: minibatches, each a tuple of arrays in the order of the program's fields, or arrays by field name. A
            program of `steps=K` gets K of them at a time, so K must divide their number.
        hyperparameters: numbers by name, within the bounds that the program declares; else its defaults.
        seed: of the program's random numbers, such as dropout masks: 0 to 2^32 - 1.
        engine: as in StepRunner.

    Returns:
        The loss of each step, before its update.

    Raises:
        TrainingError: for an unknown or out-of-bounds hyperparameter, a batch with wrong fields, or a number of
            batches that K does not divide: at once where `batches` has a length, else when they have ended.

    Example:
        step = step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1))
        history = run_steps(step, [(x, y)] * 10)
    """
    if not isinstance(batches, Iterable):
        raise TrainingError(f"run_steps: batches must be a list of batches, is {type(batches).__name__}")
    runner = StepRunner(step, hyperparameters, seed, engine=engine)
    # A list can be checked before the first step; of a generator the length is known when it has ended.
    if isinstance(batches, Sized):
        _check_whole(len(batches), runner.steps)
    losses: list[float] = []
    for group in _groups(batches, runner.steps):
        if len(group) < runner.steps:
            _check_whole(len(losses) + len(group), runner.steps)
        for metrics in runner.run(group):
            if "loss" not in metrics:
                raise TrainingError(f"run_steps: the program has no metric 'loss'; it has {sorted(metrics)}")
            losses.append(metrics["loss"])
    return losses


def _array(port: Port, given: object, sizes: dict[str, tuple[int, str]]) -> np.ndarray:
    try:
        array = np.asarray(given)
        # float64 becomes float32, but not a float an integer: then check_array says what was expected.
        if np.can_cast(array.dtype, port.dtype, "same_kind"):
            array = array.astype(port.dtype, copy=False)
        check_array("run_steps", port, array, sizes)
    except RuntimeInputError as error:
        raise TrainingError(str(error)) from None
    except (ValueError, RuntimeError) as error:
        raise TrainingError(f"run_steps: {port.name!r} is no array: {error}") from None
    if array.size == 0:
        raise TrainingError(f"run_steps: {port.name!r} has the shape {list(array.shape)}; leave empty batches out")
    return array


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    source = iter(batches)
    while group := list(islice(source, size)):
        yield group


def _check_whole(count: int, steps: int) -> None:
    if count % steps:
        raise TrainingError(
            f"run_steps: {count} batches, and the program takes {steps} at once; leave the last {count % steps} out, "
            "or build the step with steps=1"
        )


def _scalars(signature: Program, given: Mapping[str, float]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise TrainingError(f"run_steps: hyperparameters must be a mapping from name to number, is {given!r}")
    ports = {port.name: port for port in signature.inputs if isinstance(port, Hyperparameter)}
    for name, value in given.items():
        port = ports.get(name)
        if port is None:
            raise TrainingError(f"run_steps: no hyperparameter {name!r}; the program has {sorted(ports)}")
        # True is a Real, too, and NaN is within no bounds.
        if isinstance(value, bool) or not isinstance(value, Real) or not port.minimum <= value <= port.maximum:
            raise TrainingError(
                f"run_steps: {name}={value!r} is outside [{port.minimum:g}, {port.maximum:g}], its declared bounds"
            )
    return {name: np.asarray(given.get(name, port.default), port.dtype) for name, port in ports.items()}


def _initial(signature: Program, step: Model) -> dict[str, np.ndarray]:
    tensors = {}
    for port in signature.inputs:
        if not isinstance(port, Parameter | Personal | State):
            continue
        # State may start as another tensor, or filled with a number; parameters start under their own name.
        first = port.init if isinstance(port, State) and isinstance(port.init, str) else port.tensor
        if first in step.initial:
            tensors[port.tensor] = np.asarray(step.initial[first], port.dtype)
        elif isinstance(port, State) and not isinstance(port.init, str):
            tensors[port.tensor] = np.full([int(d) for d in port.shape], port.init, port.dtype)
        else:
            raise TrainingError(
                f"run_steps: no first value for {role_of(port)} {port.tensor!r}; put it in the model's `initial`"
            )
    return tensors
