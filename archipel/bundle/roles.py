"""Roles: what each input and output of a program means. An agent knows nothing else about a model.

A port is one graph input or output. `name` is the graph's own name for it; `tensor` is the logical tensor that it
reads or writes, the same in every program of a bundle. For `example`, `label` and `example_weight` the name is also
the name of the field in the local data.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal[
    "float16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
]
Dim = int | str
Lifetime = Literal["step", "round", "device"]


class Port(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="role",
):
    """One graph input or output. A `str` in `shape` is a symbolic dimension; the first axis of a field is the batch.

    In a program of several steps, fields, noise and metrics have one more axis before that, of the number of steps.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...]


class Example(Port, frozen=True, kw_only=True, tag="example"):
    """A field of the local batch that the model sees."""


class Label(Port, frozen=True, kw_only=True, tag="label"):
    """A field of the local batch that the loss compares with."""


class ExampleWeight(Port, frozen=True, kw_only=True, tag="example_weight"):
    """A weight for each example of the batch; 1 where the local data has none."""


class Feature(Port, frozen=True, kw_only=True, tag="feature"):
    """What `features` computes once from each example; a field of the batch for the programs that read it.

    It depends on nothing that training changes, so it stays the same for the whole round.
    """


class Prediction(Port, frozen=True, kw_only=True, tag="prediction"):
    """What `predict` answers for the batch, in its output `output`.

    `evaluate` reads answers and no parameters, so it can only measure the program that the device predicts with.
    """

    output: str


class Parameter(Port, frozen=True, kw_only=True, tag="parameter"):
    """A tensor of the global model; as an output, its new value."""

    tensor: str


class Start(Port, frozen=True, kw_only=True, tag="start"):
    """The value that parameter `tensor` had when the round started."""

    tensor: str


class Personal(Port, frozen=True, kw_only=True, tag="personal"):
    """Like `parameter`, but it never leaves the device.

    Its first value is the tensor `init` of weights.safetensors (None: the tensor of its own name). Where `init` names
    a parameter, the first value is that parameter as the device first received it.
    """

    tensor: str
    init: str | None = None


class State(Port, frozen=True, kw_only=True, tag="state"):
    """A tensor kept between steps, such as momentum, control variates or running statistics.

    `init` is the number that fills it, or the name of a tensor of weights.safetensors. `lifetime` says when the runtime
    resets it to that: `step` (before every step), `round` (before every round), `device` (never).
    """

    tensor: str
    lifetime: Lifetime
    init: float | str = 0.0


class Broadcast(Port, frozen=True, kw_only=True, tag="broadcast"):
    """A tensor that the server sends this round; devices do not change it. The strategy gives its first value."""

    tensor: str


class Hyperparameter(Port, frozen=True, kw_only=True, tag="hyperparameter"):
    """A scalar that the plan may set, within [minimum, maximum]."""

    default: float
    minimum: float
    maximum: float


class Count(Port, frozen=True, kw_only=True, tag="count"):
    """How many examples the device trained on in this round (each counted once), or how many steps it made."""

    of: Literal["examples", "steps"]


class Step(Port, frozen=True, kw_only=True, tag="step"):
    """Number of the step within the round, from 0 (of the first, for a program of several); the runtime supplies it."""


class Seed(Port, frozen=True, kw_only=True, tag="seed"):
    """The round's seed for the counter-based hash; the runtime supplies it.

    In rounds it is derived from a secret of the device, so that nobody else can predict what a graph derives from it.
    """


class Noise(Port, frozen=True, kw_only=True, tag="noise"):
    """Exact samples for differential privacy, drawn by the runtime from a cryptographic generator, never from `seed`.

    `scale` is the standard deviation (gaussian) or the parameter sigma (discrete_gaussian; Canonne et al. 2020).
    `multiplier` is `scale` divided by the sensitivity: the largest L2 norm that one example adds to all the program's
    noised tensors together. It is 0 where the publisher does not state it. Everything that the program writes has
    noise.
    """

    distribution: Literal["gaussian", "discrete_gaussian"]
    scale: float
    multiplier: float = 0.0


class Output(Port, frozen=True, kw_only=True, tag="output"):
    """What `predict` answers."""


class Derived(Port, frozen=True, kw_only=True, tag="derived"):
    """An output of `refresh`: the new value of the initializer `tensor` of the `predict` graph."""

    tensor: str


class Carrier(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="method",
):
    """An update entry carries the changes of these parameters, one after the other, in another form."""

    parameters: tuple[str, ...]


class Rotation(Carrier, frozen=True, kw_only=True, tag="rotation"):
    """The entry `[blocks, block]` is one vector, rotated.

    The vector is padded with zeros; its element i is in row i modulo `blocks`. Each row has random signs, which follow
    from the hyperparameter `update_seed`, and is transformed (Walsh-Hadamard); its elements are rounded to a step above
    or below, by chance (strategies.update_compression). With `taken`, the entry is `[taken]`, so many elements of the
    rows, at places that follow from `update_seed`; the device keeps the others for a later round.
    """

    block: int
    taken: int = 0


class Largest(Carrier, frozen=True, kw_only=True, tag="largest"):
    """The entry `[elements]` is one vector, of which at most `most` elements are not 0.

    They are those with the largest absolute values; the device keeps the others for a later round. Only plain rounds
    can have it, as each device has elements of its own.
    """

    most: int


class LowRank(Carrier, frozen=True, kw_only=True, tag="low_rank"):
    """The entry `[rows + columns, rank]` has two factors of the change of one parameter.

    The parameter is taken for the matrix M of its first axis and all others. The factors are M times one basis, and the
    transpose of M times the other, both times the root of 1/2 (strategies.update_compression.low_rank); `finish` reads
    the bases as broadcasts.
    """


class Update(Port, frozen=True, kw_only=True, tag="update"):
    """An entry of the uploaded vector, which the server sums. Entries have the order of the program's outputs.

    `kind`: `delta` (the change of parameter `tensor`), `weight` (scalar: the factor of this device's entries, so that
    the server gets the sum of the weights, too), `value` (anything that the strategy's server half reads by its name
    `tensor`), `mean` or `variance` (the change of parameter `tensor`, a running mean or variance of a
    BatchNormalization, as strategies.running_statistics says; a variance names its `mean`). The graph applies the
    weight and the clipping.

    `clip` is the largest L2 norm of all clipped entries of this kind together, before weighting: one number for the
    deltas and one for the values of a program (None: not clipped). For the fixed-point encoding each element is clamped
    to [-range, range] and rounded to `bits` bits. `lowest`, of a weight, is the smallest one, of a device with a single
    example. `carries`, of a delta, says that it has the changes of several parameters in another form, and `tensor` is
    then none of them. `noise` is the standard deviation of the noise that the program adds to each element, after
    clipping and weighting.
    """

    tensor: str
    kind: Literal["delta", "weight", "value", "mean", "variance"]
    weighting: Literal["examples", "uniform", "steps"]
    range: float
    bits: int
    clip: float | None = None
    lowest: float = 0.0
    noise: float = 0.0
    mean: str = ""
    carries: Rotation | Largest | LowRank | None = None


CHANGES = ("delta", "mean", "variance")
"""The kinds of update entries that change a parameter. In an asynchronous task stale ones count less."""


class Metric(Port, frozen=True, kw_only=True, tag="metric"):
    """A scalar (one for each of the program's steps), and how its values over steps or batches are reduced to one.

    With a `range`, training rounds sum the metric over the devices, and the range bounds its absolute value. Of a
    `train` program it is a mean; of `finish` it is 0 or 1 of each device, with the range 1, and the round counts the
    ones. Without a range it stays on the device.
    """

    reduction: Literal["sum", "mean", "last"]
    range: float | None = None


Input = (
    Example
    | Label
    | ExampleWeight
    | Feature
    | Prediction
    | Parameter
    | Start
    | Personal
    | State
    | Broadcast
    | Hyperparameter
    | Count
    | Step
    | Seed
    | Noise
)
Result = Output | Feature | Parameter | Personal | State | Derived | Update | Metric

ProgramKind = Literal["predict", "evaluate", "features", "train", "begin", "finish", "refresh", "analyze"]

_DATA = {"example", "label", "example_weight"}
_ROUND = {"start", "broadcast", "hyperparameter", "count", "step", "seed", "noise"}
_MODEL = {"parameter", "personal", "state"}

ALLOWED: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    # kind: (roles of inputs, roles of outputs)
    "predict": (frozenset({"example", *_MODEL, "hyperparameter"}), frozenset({"output"})),
    "evaluate": (frozenset({"prediction", "label", "example_weight", "hyperparameter"}), frozenset({"metric"})),
    "features": (frozenset({"example"}), frozenset({"feature"})),
    "train": (
        frozenset(
            {*_DATA, "feature", *_MODEL, "start", "broadcast", "hyperparameter", "count", "step", "seed", "noise"}
        ),
        frozenset({*_MODEL, "metric"}),
    ),
    "begin": (frozenset({*_MODEL, "broadcast", "hyperparameter", "seed"}), frozenset({"state", "personal"})),
    "finish": (
        frozenset({*_MODEL, "start", "broadcast", "hyperparameter", "count", "seed", "noise"}),
        frozenset({"update", "state", "personal", "metric"}),
    ),
    "refresh": (frozenset(_MODEL), frozenset({"derived"})),
    # No seed: with a number that differs from device to device, a graph could write each device's data to another
    # element of the sum, where it stands alone.
    "analyze": (frozenset({*_DATA, *_MODEL, "hyperparameter", "noise"}), frozenset({"update"})),
}
"""Which roles each kind of program may read and write."""


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A graph and the meaning of its inputs and outputs, each in the graph's own order.

    `file` is the name of the graph's file in the bundle; empty while the program is not in a bundle yet. `steps` is how
    many minibatches a `train` program takes at once. With more than 1 its fields and noise have the shape
    `[steps, ...]`, its metrics `[steps]`, and it returns parameters and state after the last step. `repeats` then names
    the program of one minibatch whose steps it makes: a runtime may run it wherever the schedule names that program and
    `steps` batches of one size are left.

    Example:
        program = open_bundle("digits.bundle", trusted_keys).program("train")
        print(program.kind, [(port.name, role_of(port)) for port in program.inputs])
    """

    kind: ProgramKind
    inputs: tuple[Input, ...]
    outputs: tuple[Result, ...]
    file: str = ""
    steps: int = 1
    repeats: str = ""


def role_of(port: Port) -> str:
    """The role's name as the manifest spells it, such as "example".

    Example: see `archipel.bundle.Program`.
    """
    return str(port.__struct_config__.tag)
