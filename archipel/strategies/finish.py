"""Parts that the `finish` programs of strategies share: clipped deltas, weighted by examples, and their ports.

`weighted_deltas` is the whole `finish` of every algorithm that uploads only those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from archipel.bundle import Program
from archipel.bundle.roles import Count, Metric, Parameter, Start, Update
from archipel.errors import ConversionError
from archipel.protocol.metrics.training_metrics import CAPPED, CLIPPED
from archipel.strategies.clipping import choose_clip, clip_port
from archipel.strategies.device import LocalTraining, MakeProgram, Upload, Weighting
from archipel.strategies.program import ProgramGraph
from archipel.strategies.running_statistics import upload_statistics
from archipel.strategies.update_compression.packed import upload_packed

if TYPE_CHECKING:
    import onnx

AddDelta = Callable[[ProgramGraph, LocalTraining, str], str]
"""Adds what a device changed of a parameter, given its name; returns the value's name, `NAME.SOMETHING`."""


def weighted_deltas(
    options: Upload,
    add: AddDelta | None = None,
    *,
    keep: Callable[[ProgramGraph, LocalTraining], None] | None = None,
    clip_share: float = 1.0,
    feedback: bool = True,
) -> MakeProgram:
    """`finish` of federated averaging. `add` None: the delta is end - start (`add_delta`). `keep` adds further outputs.
    `clip_share` is that of `choose_clip`, `feedback` that of `upload_packed`.

    Its inputs are `NAME.start` and `NAME` of every parameter, and the count of examples. Its outputs are `NAME.update`
    = delta * min(1, clip / |all deltas|) * weight, what running statistics changed, and the weight,
    min(examples, weight_cap) / weight_cap. With uniform weighting it has neither count nor weight. Metrics say whether
    the update was clipped and the weight capped.
    """

    def make(local: LocalTraining) -> tuple[onnx.ModelProto, Program]:
        upload = choose_clip(options, local, clip_share)
        graph = ProgramGraph("finish", upload.strategy)
        deltas = {name: (add or add_delta)(graph, local, name) for name in local.parameters}
        squares = [add_square(graph, delta, f"{name}.square") for name, delta in deltas.items()]
        add_constants(graph, upload)
        shrink = factor = add_clip_factor(graph, squares, graph.own("clip"))
        if upload.weighting == "examples":
            add_examples(graph)
            factor = graph.node("Mul", [factor, add_weight(graph)], graph.own("factor"))
        of = {delta.removeprefix(f"{name}.") for name, delta in deltas.items()}.pop()
        sent = upload_deltas(graph, local, upload, factor, upload.weighting, of, feedback=feedback)
        if sent is not None:
            shrink = graph.node("Min", [shrink, sent], graph.own("shrinks"))
        upload_statistics(graph, local, upload)
        upload_weight(graph, upload)
        report_limits(graph, upload, shrink)
        if keep is not None:
            keep(graph, local)
        return graph.build()

    return make


def add_delta(graph: ProgramGraph, local: LocalTraining, name: str) -> str:
    """Add end - start of a parameter. Raises ConversionError for another type than float32."""
    array = local.parameters[name]
    if array.dtype.name != "float32":
        raise ConversionError(
            f"strategy {graph.name!r}: parameter {name!r} is {array.dtype}; only float32 can be averaged"
        )
    start = graph.input(Start(name=f"{name}.start", tensor=name, dtype="float32", shape=array.shape))
    end = graph.input(Parameter(name=name, tensor=name, dtype="float32", shape=array.shape))
    return graph.node("Sub", [end, start], f"{name}.delta")


def clip_deltas(graph: ProgramGraph, local: LocalTraining, upload: Upload) -> str:
    """Add the constants, and the delta of every parameter. Returns the factor that clips all deltas together."""
    squares = [add_square(graph, add_delta(graph, local, name), f"{name}.square") for name in local.parameters]
    add_constants(graph, upload)
    return add_clip_factor(graph, squares, graph.own("clip"))


def add_square(graph: ProgramGraph, value: str, output: str) -> str:
    """Add the sum of the squared elements of `value`."""
    return graph.node("ReduceSumSquare", [value], output, keepdims=0)


def add_examples(graph: ProgramGraph) -> str:
    """Add the count of the round's examples as an input."""
    return graph.input(Count(name=graph.own("examples"), dtype="int64", shape=(), of="examples"))


def add_constants(graph: ProgramGraph, upload: Upload) -> None:
    graph.constant("one", 1.0)
    if upload.start is None:
        graph.constant("clip", upload.bound)
    else:
        # Whatever a plan asks for, the graph keeps the bound that the update entries state.
        asked = graph.input(clip_port(upload, upload.start))
        graph.node("Min", [asked, graph.constant("largest_clip", upload.bound)], graph.own("clip"))
    if upload.weighting == "examples":
        graph.constant("cap", float(upload.weight_cap))
    graph.constant("tiny", 1e-12)


def add_clip_factor(graph: ProgramGraph, squares: list[str], bound: str, prefix: str = "") -> str:
    """Add min(1, bound / norm), the factor that clips tensors to `bound`; the `squares` add up to norm^2."""

    def own(name: str) -> str:
        return graph.own(prefix + name)

    norm = graph.node("Sqrt", [graph.node("Sum", squares, own("squares"))], own("norm"))
    # Never divide by a norm of 0: the ratio is then large, and the minimum gives 1.
    norm = graph.node("Max", [norm, graph.own("tiny")], own("norm_above_zero"))
    return graph.node("Min", [graph.node("Div", [bound, norm], own("ratio")), graph.own("one")], own("shrink"))


def add_weight(graph: ProgramGraph) -> str:
    """Add the device's weight, min(examples, cap) / cap."""
    examples = graph.node("Cast", [graph.own("examples")], graph.own("examples_float"), to=1)
    capped = graph.node("Min", [examples, graph.own("cap")], graph.own("examples_capped"))
    return graph.node("Div", [capped, graph.own("cap")], graph.own("weight"))


def add_gradient_weights(graph: ProgramGraph, momentum: float) -> str:
    """Add a, the sum of the weights with which t steps of SGD add up their gradients: t, or with momentum m
    (t - m (1 - m^t) / (1 - m)) / (1 - m), as each gradient moves the parameters in the steps after it too."""
    count = graph.input(Count(name=graph.own("count"), dtype="int64", shape=(), of="steps"))
    steps = graph.node("Cast", [count], graph.own("count_float"), to=1)
    if not momentum:
        return steps
    power = graph.node("Pow", [graph.constant("momentum", momentum), steps], graph.own("power"))
    decayed = graph.node("Sub", [graph.own("one"), power], graph.own("decayed"))
    ratio = graph.constant("momentum_ratio", momentum / (1.0 - momentum))
    lost = graph.node("Mul", [decayed, ratio], graph.own("lost"))
    kept = graph.node("Sub", [steps, lost], graph.own("kept"))
    return graph.node("Mul", [kept, graph.constant("gain", 1.0 / (1.0 - momentum))], graph.own("gradients"))


def upload_deltas(
    graph: ProgramGraph,
    local: LocalTraining,
    upload: Upload,
    factor: str,
    weighting: Weighting,
    of: str = "delta",
    *,
    feedback: bool = False,
) -> str | None:
    """Add the output `NAME.update` of each parameter: `NAME.OF` times the factor; or one that carries all of them.

    `feedback` and what is returned are those of `upload_packed`.
    """
    changes = [graph.node("Mul", [f"{name}.{of}", factor], f"{name}.update") for name in local.parameters]
    if upload.compress is not None:
        return upload_packed(graph, local, upload, changes, weighting, feedback=feedback)
    for (name, array), entry in zip(local.parameters.items(), changes, strict=True):
        graph.output(
            Update(
                name=entry, tensor=name, dtype="float32", shape=array.shape,
                kind="delta", weighting=weighting, range=upload.range, bits=upload.bits, clip=upload.bound,
            )
        )  # fmt: skip
    return None


def report_limits(graph: ProgramGraph, upload: Upload, shrink: str) -> None:
    """Add the metrics of what limited the update: the factor `shrink` below 1, and more examples than the cap."""
    report_clipped(graph, shrink)
    if upload.weighting == "examples":
        more = [graph.own("examples_float"), graph.own("cap")]
        _report(graph, CAPPED, graph.node("Greater", more, graph.own("is_capped")))


def report_clipped(graph: ProgramGraph, shrink: str) -> None:
    """Add the metric of an update that was clipped: the factor `shrink` below 1."""
    _report(graph, CLIPPED, graph.node("Less", [shrink, graph.own("one")], graph.own("is_clipped")))


def _report(graph: ProgramGraph, name: str, condition: str) -> None:
    graph.node("Cast", [condition], name, to=1)
    graph.output(Metric(name=name, dtype="float32", shape=(), reduction="last"))


def upload_weight(graph: ProgramGraph, upload: Upload) -> None:
    """Add the weight as an output, where devices have one."""
    if upload.weighting == "uniform":
        return
    weight = graph.own("weight")
    graph.output(
        Update(
            name=weight, tensor=weight, dtype="float32", shape=(), kind="weight", weighting="examples",
            range=1.0, bits=weight_bits(upload), lowest=1.0 / upload.weight_cap,
        )
    )  # fmt: skip


def weight_bits(upload: Upload) -> int:
    """So many that the weight of a single example, 1 / weight_cap, is at least a step of the encoding."""
    return max(upload.other_bits, upload.weight_cap.bit_length() + 1)
