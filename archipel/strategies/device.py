"""A description of the device half of a federated algorithm: which tensors it trains, what a step adds, which phases.

The converter makes train programs and roles from it. The strategy itself writes `begin` and `finish` as ONNX, because
they need no gradients. Nothing in this file needs onnx.
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
from archipel.protocol.metrics.training_metrics import OTHER_BITS

if TYPE_CHECKING:
    import onnx

COPY = "own/"
"""Prefix of the name of a device's own copy of a parameter."""
CORRECTION = "correction"
"""`Correction` adds the round state CORRECTION/PARAMETER to the gradient of the parameter."""
PREVIOUS = "previous/"
"""Prefix of the names of a device's model of its last round, a state that `Contrast` reads."""
STACK = ".models"
"""Suffix of the name of a stack: one parameter of several models, of which a device trains one (`Models`)."""
CHOICE = "models/choice"
"""The state with the number of the model that the device chose last, int64; it begins with 0."""
LOGITS = "logits/mean"
"""The one parameter of a federation whose models differ: for each label the mean output, [labels, outputs]."""
LOGIT_SUMS, LOGIT_COUNTS = "logits/sums", "logits/counts"
"""Round states of a part that measures these: for each label the sum of the outputs, and how many examples had it."""
MOST_LOGIT = 30.0
"""An output counts as at most this in the mean: a softmax of which one entry leads by it is 1 - 10^-13 there."""
MEASURED_LOSS, MEASURED_COUNT = "measured/loss", "measured/count"
"""Round states of a part that trains nothing: the sum of the labels' losses, and how many labels there were. Of a part
that chooses, the first has the sum of each model."""
MAX_BITS = 30
Weighting = Literal["examples", "uniform"]
COMPRESSIONS = ("rotation", "random_k", "top_k", "low_rank")
"""What the option `compress` may be."""


@dataclass(frozen=True)
class Pull:
    """Adds s (tensor - the parameter at the round's start) to the gradient.

    s is the hyperparameter `name`, whose default is `strength`.
    """

    name: str
    strength: float


@dataclass(frozen=True)
class Correction:
    """Adds the round state CORRECTION/PARAMETER, which `begin` makes, to the gradient of each parameter."""


@dataclass(frozen=True)
class ClipExamples:
    """Clips each example's gradient to the L2 norm `clip` and adds noise of deviation noise * clip to their sum."""

    clip: float
    noise: float


@dataclass(frozen=True)
class Tries:
    """Steps in pairs: one at the rate of the hyperparameter inner_lr is tried out, the next learns from where it led.

    The round state PARAMETER.tried is how far the parameter lies from what is learned (training.nested.MetaSGD).
    """

    inner_lr: float


@dataclass(frozen=True)
class Follows:
    """The parameter is pulled to a local model by lambda, which follows it at the rate local_lr every `every` steps.

    The defaults of these hyperparameters are `strength` and `local_lr`. The round state PARAMETER.moved is how far the
    local model went (training.nested.MoreauSGD).
    """

    strength: float
    local_lr: float
    every: int


@dataclass(frozen=True)
class Contrast:
    """Adds `strength` times a contrastive loss: features near the received model's, far from the last round's.

    `features` names a tensor of the graph; None: what the last layer reads. `finish` writes the states PREVIOUS +
    PARAMETER of all parameters.
    """

    features: str | None
    strength: float
    temperature: float


@dataclass(frozen=True)
class Distill:
    """Adds `strength` times the cross entropy between the outputs and the softmax of LOGITS' row of the label.

    A row of zeros, of a label that nobody has had, adds nothing.
    """

    strength: float


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters on the weights of Gemm, MatMul, Conv and embeddings that match `targets`.

    A weight is W + alpha / rank * B A; only A and B, and tensors that match `full`, are parameters. `seed` is that of
    A's first values.
    """

    targets: tuple[str, ...]
    rank: int
    alpha: float
    full: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Models:
    """`count` models of which each device trains the one of the least loss: a parameter is a stack NAME.models.

    Stacks are [count, ...], and the graph reads the slice that the device's state CHOICE says. The first model is the
    given one. Of the others each tensor is sqrt(1 - spread^2) of it, plus `spread` times normal numbers of its root
    mean square, drawn from `seed`.
    """

    count: int
    spread: float
    seed: int


Term = Pull | Correction | ClipExamples | Tries | Follows | Contrast | Distill


@dataclass(frozen=True)
class Part:
    """One phase of the local round, and its train program.

    `trains`: "all" tensors, the "shared" ones, the "personal" ones, or "copies" of all parameters that stay on the
    device; "nothing": the part adds up the loss of the received model over its batches, in the round states
    MEASURED_LOSS and MEASURED_COUNT; "choice": it does so for each of several models, and keeps in the state CHOICE
    which has the least; "logits": it adds up the outputs of the device's model, by label, in LOGIT_SUMS and
    LOGIT_COUNTS. It takes `epochs`, or `steps` of a batch each; both None: the epochs that
    `convert` got. `terms` are added to the gradient, or change how steps are made.
    """

    program: str = "train"
    trains: Literal["all", "shared", "personal", "copies", "nothing", "choice", "logits"] = "all"
    epochs: int | None = None
    steps: int | None = None
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class RunningPair:
    """The names of the running mean and variance of one BatchNormalization (or of several that share both)."""

    mean: str
    variance: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LocalTraining:
    """The facts about the model and its train programs that `begin` and `finish` may need.

    `parameters` are the shared ones, which devices upload; `hyperparameters` the train programs' ports by name;
    `momentum` is that of the optimizer; `statistics` are the running statistics that devices share; `max_clip` is that
    of the privacy policy.
    """

    parameters: Mapping[str, np.ndarray]
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)
    momentum: float = 0.0
    statistics: Sequence[RunningPair] = ()
    max_clip: float = math.inf


MakeProgram = Callable[[LocalTraining], "tuple[onnx.ModelProto, Program]"]
"""A graph and its signature. Needs onnx."""


@dataclass(frozen=True)
class DeviceHalf:
    """Everything that a device does in a round.

    `personal` are globs of tensors that stay on the device, as the weights of `personal_operators` do; the running
    statistics of a BatchNormalization stay there with its scale or shift. With `logits` all of the model's tensors do,
    and the parameter LOGITS is what devices share. `optimizer` says with which optimizers
    `finish` is right: "any", "sgd" (plain, at a constant rate) or "momentum" (SGD with or without momentum).
    """

    finish: MakeProgram
    begin: MakeProgram | None = None
    parts: tuple[Part, ...] = (Part(),)
    personal: tuple[str, ...] = ()
    personal_operators: tuple[str, ...] = ()
    adapters: Adapters | None = None
    models: Models | None = None
    logits: bool = False
    optimizer: Literal["any", "sgd", "momentum"] = "any"


@dataclass(frozen=True)
class Upload:
    """How an update is clipped, weighted and encoded: options that every strategy has.

    Arguments:
        strategy: the strategy's name, for errors.
        clip: the bound of the L2 norm of all delta entries together. None: it is chosen with the model, and the server
            adapts it from round to round, see strategies.clipping.
        value_range: the bound of one element in the fixed-point encoding; None: `clip`, or chosen with the clip.
        bits: bits of an element in that encoding, from 2 to 30.
        weight_cap: with `weighting` "examples", a device with n examples weighs min(n, weight_cap) / weight_cap.
        weighting: "examples", or "uniform", where each device weighs 1.
        statistics_range: the most by which one device can ask to shift a running mean of a BatchNormalization in a
            round, in standard deviations, 1 or more; of a running variance its square, in variances.
        compress: how the deltas are packed, see strategies.update_compression; None: each parameter's for itself.
        share: of the elements that "random_k" and "top_k" send in a round, above 0 and at most 1.
        compress_rank: columns of the factors that "low_rank" sends of each matrix, 1 or more.
        start: where the server adapts the clip, the first one; `clip` is then the largest (no option of `convert`).

    Raises ConversionError for values out of bounds.
    """

    strategy: str
    clip: float | None = None
    value_range: float | None = None
    bits: int = 16
    weight_cap: int = 100
    weighting: Weighting = "examples"
    statistics_range: float = 3.0
    compress: Literal["rotation", "random_k", "top_k", "low_rank"] | None = None
    share: float = 0.01
    compress_rank: int = 2
    start: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_positive(self.strategy, "clip", self.clip)
        if self.value_range is not None:
            check_positive(self.strategy, "value_range", self.value_range)
        if check_whole(self.strategy, "bits", self.bits, 2) > MAX_BITS:
            raise ConversionError(f"strategy {self.strategy!r}: bits must be at most {MAX_BITS}, is {self.bits}")
        # So that the weight of a single example, 1 / weight_cap, is at least a step of the encoding.
        if check_whole(self.strategy, "weight_cap", self.weight_cap, 1).bit_length() + 1 > MAX_BITS:
            raise ConversionError(f"strategy {self.strategy!r}: weight_cap must be below {1 << (MAX_BITS - 1)}")
        if self.weighting not in ("examples", "uniform"):
            raise ConversionError(
                f"strategy {self.strategy!r}: weighting must be 'examples' or 'uniform', is {self.weighting!r}"
            )
        if self.compress is not None and self.compress not in COMPRESSIONS:
            raise ConversionError(
                f"strategy {self.strategy!r}: compress must be one of {', '.join(COMPRESSIONS)}, is {self.compress!r}"
            )
        _number(self.strategy, "share", self.share, "above 0 and at most 1", lambda x: 0 < x <= 1)
        check_whole(self.strategy, "compress_rank", self.compress_rank, 1)
        # Below 1 a variance could not shrink by itself: the change to 0 is -1 in units of the variance.
        _number(self.strategy, "statistics_range", self.statistics_range, "of 1 or more", lambda x: x >= 1)

    @property
    def bound(self) -> float:
        """The largest clip. Raises ConversionError before it is chosen (strategies.clipping.choose_clip)."""
        if self.clip is None:
            raise ConversionError(f"strategy {self.strategy!r}: clip is chosen with the model, and there is none here")
        return float(self.clip)

    @property
    def range(self) -> float:
        """The bound of one element in the fixed-point encoding."""
        return self.bound if self.value_range is None else float(self.value_range)

    @property
    def other_bits(self) -> int:
        """Bits of the entries beside the deltas. They are few, and are rounded to the nearest step where deltas that
        are packed into fewer bits are not."""
        return self.bits if self.compress is None else max(self.bits, OTHER_BITS)


UPLOAD_OPTIONS = tuple(f.name for f in fields(Upload) if f.name not in ("strategy", "start"))
"""The options that every strategy has."""

MakeDevice = Callable[..., DeviceHalf]
"""`Upload` and the strategy's own options, by keyword -> the device half."""


def describe(name: str, make: MakeDevice, options: Mapping[str, Any]) -> DeviceHalf:
    """The device half with these options. Raises ConversionError for unknown or missing options and wrong values."""
    common = set(UPLOAD_OPTIONS)
    # The strategy's own options are the arguments of its `device` function, after the Upload.
    own = {p.name: p for p in list(inspect.signature(make).parameters.values())[1:]}
    if not isinstance(options, Mapping):
        raise ConversionError(f"strategy_options must be a mapping from name to value, is {options!r}")
    for option in options:
        if option not in common and option not in own:
            known = ", ".join(sorted(common | own.keys()))
            raise ConversionError(f"strategy {name!r}: no option {option!r}; it has {known}")
    for option, parameter in own.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConversionError(f"strategy {name!r}: needs the option {option!r}; pass strategy_options={{...}}")
    upload = Upload(name, **{key: value for key, value in options.items() if key in common})
    return make(upload, **{key: value for key, value in options.items() if key in own})


def check_positive(strategy: str, option: str, value: object) -> float:
    """`value` as a float, finite and above 0."""
    return _number(strategy, option, value, "above 0", lambda x: x > 0)


def check_not_negative(strategy: str, option: str, value: object) -> float:
    """`value` as a float, finite and at least 0."""
    return _number(strategy, option, value, "at least 0", lambda x: x >= 0)


def check_share(strategy: str, option: str, value: object) -> float:
    """`value` as a float, from 0 to below 1."""
    return _number(strategy, option, value, "from 0 to below 1", lambda x: 0 <= x < 1)


def check_whole(strategy: str, option: str, value: object, low: int) -> int:
    """`value` as an int of `low` or more."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low:
        return int(value)
    raise ConversionError(f"strategy {strategy!r}: {option} must be a whole number of {low} or more, is {value!r}")


def check_patterns(strategy: str, option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """One glob or several over tensor names, as a tuple."""
    globs = (value,) if isinstance(value, str) else value
    if not isinstance(globs, Sequence) or not all(isinstance(pattern, str) for pattern in globs):
        raise ConversionError(f"strategy {strategy!r}: {option} must be a pattern or a list of them, is {value!r}")
    return tuple(globs)


def _number(strategy: str, option: str, value: object, bounds: str, holds: Callable[[float], bool]) -> float:
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and holds(float(value)):
        return float(value)
    raise ConversionError(f"strategy {strategy!r}: {option} must be a number {bounds}, is {value!r}")
