"""The device half of a federated algorithm, described: which tensors it is about, what a step adds, which phases.

A strategy says here what is to happen; the converter makes train programs and roles of it. `begin` and `finish` are
written as ONNX by the strategy itself, as they need no gradients. Nothing in this file needs onnx.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Hyperparameter
from archipel.errors import ConversionError

if TYPE_CHECKING:
    import onnx

COPY = "own/"
"""What the name of a device's own copy of a parameter begins with."""
CORRECTION = "correction"
"""Round state CORRECTION/PARAMETER is what `Correction` adds to the gradient of the parameter."""
MAX_BITS = 30


@dataclass(frozen=True)
class Pull:
    """Gradient + s (tensor - the parameter at the round's start); s is hyperparameter `name`, by default `strength`."""

    name: str
    strength: float


@dataclass(frozen=True)
class Correction:
    """Gradient + the round state CORRECTION/name of each parameter, which `begin` makes."""


@dataclass(frozen=True)
class ClipExamples:
    """Each example's gradient is held to the L2 norm `clip`; their sum gets noise of deviation noise * clip."""

    clip: float
    noise: float


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters on the weights of Gemm, MatMul and Conv that match `targets`; `full` is trained as it is.

    A weight is W + alpha / rank * B A; only A and B (and what matches `full`) are parameters.
    """

    targets: tuple[str, ...]
    rank: int
    alpha: float
    full: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Part:
    """One phase of the local round, and its train program.

    `trains`: "all" tensors, the "shared" ones, the "personal" ones, or "copies" of all parameters that stay on the
    device. `epochs` None: as many as `convert` was asked for.
    """

    program: str = "train"
    trains: Literal["all", "shared", "personal", "copies"] = "all"
    epochs: int | None = None
    terms: tuple[Pull | Correction | ClipExamples, ...] = ()


@dataclass(frozen=True)
class LocalTraining:
    """What `begin` and `finish` may have to know of the model and its train programs.

    `parameters` are the shared ones, those that are uploaded; `hyperparameters` the train programs' ports by name;
    `momentum` is that of the optimizer.
    """

    parameters: Mapping[str, np.ndarray]
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)
    momentum: float = 0.0


MakeProgram = Callable[[LocalTraining], "tuple[onnx.ModelProto, Program]"]
"""A graph and its signature. Needs onnx."""


@dataclass(frozen=True)
class DeviceHalf:
    """All that a device does in a round.

    `personal` are globs of tensors that stay on the device, and so do the weights of `personal_operators`. `optimizer`
    says what `finish` can account for: "any", "sgd" (plain, at a constant rate) or "momentum" (SGD with or without it).
    """

    finish: MakeProgram
    begin: MakeProgram | None = None
    parts: tuple[Part, ...] = (Part(),)
    personal: tuple[str, ...] = ()
    personal_operators: tuple[str, ...] = ()
    adapters: Adapters | None = None
    optimizer: Literal["any", "sgd", "momentum"] = "any"


@dataclass(frozen=True)
class Upload:
    """How an update travels, for every strategy the same options.

    `clip` bounds the L2 norm of all delta entries together; `value_range` (default: `clip`) bounds one element in the
    fixed-point encoding, whose `bits` it decides the resolution of. With `weighting` examples a device with
    `weight_cap` examples or more weighs 1, one with fewer its share of that; with uniform each weighs 1. Raises
    ConversionError for values out of bounds.
    """

    strategy: str
    clip: float = 1.0
    value_range: float | None = None
    bits: int = 16
    weight_cap: int = 100
    weighting: Literal["examples", "uniform"] = "examples"

    def __post_init__(self) -> None:
        positive(self.strategy, "clip", self.clip)
        if self.value_range is not None:
            positive(self.strategy, "value_range", self.value_range)
        if whole(self.strategy, "bits", self.bits, 2) > MAX_BITS:
            raise ConversionError(f"strategy {self.strategy!r}: bits must be at most {MAX_BITS}, is {self.bits}")
        # So that the weight of a single example is a step of the encoding at least.
        if whole(self.strategy, "weight_cap", self.weight_cap, 1).bit_length() + 1 > MAX_BITS:
            raise ConversionError(f"strategy {self.strategy!r}: weight_cap must be below {1 << (MAX_BITS - 1)}")
        if self.weighting not in ("examples", "uniform"):
            raise ConversionError(
                f"strategy {self.strategy!r}: weighting must be 'examples' or 'uniform', is {self.weighting!r}"
            )

    @property
    def range(self) -> float:
        return float(self.clip if self.value_range is None else self.value_range)


MakeDevice = Callable[..., DeviceHalf]
"""`Upload` and the strategy's own options, by keyword -> the device half."""


def describe(name: str, make: MakeDevice, options: Mapping[str, Any]) -> DeviceHalf:
    """The device half with these options. Raises ConversionError for one that it does not have, or of a wrong value."""
    common = {f.name for f in fields(Upload)} - {"strategy"}
    own = {p.name: p for p in list(inspect.signature(make).parameters.values())[1:]}
    if not isinstance(options, Mapping):
        raise ConversionError(f"strategy_options must be a mapping from name to value, is {options!r}")
    for option in options:
        if option not in common and option not in own:
            there = ", ".join(sorted(common | own.keys()))
            raise ConversionError(f"strategy {name!r}: no option {option!r}; it has {there}")
    for option, parameter in own.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConversionError(f"strategy {name!r}: needs the option {option!r}; pass strategy_options={{...}}")
    upload = Upload(name, **{key: value for key, value in options.items() if key in common})
    return make(upload, **{key: value for key, value in options.items() if key in own})


def positive(strategy: str, option: str, value: object) -> float:
    """`value` as a float, finite and above 0."""
    return _number(strategy, option, value, "above 0", lambda x: x > 0)


def not_negative(strategy: str, option: str, value: object) -> float:
    """`value` as a float, finite and at least 0."""
    return _number(strategy, option, value, "at least 0", lambda x: x >= 0)


def whole(strategy: str, option: str, value: object, low: int) -> int:
    """`value` as an int of `low` or more."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low:
        return int(value)
    raise ConversionError(f"strategy {strategy!r}: {option} must be a whole number of {low} or more, is {value!r}")


def patterns(strategy: str, option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """One glob or several over tensor names, as a tuple."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(pattern, str) for pattern in found):
        raise ConversionError(f"strategy {strategy!r}: {option} must be a pattern or a list of them, is {value!r}")
    return tuple(found)


def _number(strategy: str, option: str, value: object, bounds: str, holds: Callable[[float], bool]) -> float:
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and holds(float(value)):
        return float(value)
    raise ConversionError(f"strategy {strategy!r}: {option} must be a number {bounds}, is {value!r}")
