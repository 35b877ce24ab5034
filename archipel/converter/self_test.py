"""Self-test vectors of a bundle: a few examples and what `predict` answers to them where the bundle was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime

from archipel.bundle import SelfTest, write_weights
from archipel.bundle.roles import Dim, Example, Hyperparameter, Parameter, Personal, Port, State
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.shapes import constant_array
from archipel.graph.walk import trace_back
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.onnx_runtime import error_types, open_exact
from archipel.lite_runtime.fields import describe

FILE = "self_test.safetensors"
ROWS = 4
SHARE, SMALL_BYTES = 0.25, 256 << 10
"""Several examples take at most this share of the rest of the bundle, or SMALL_BYTES if that is more; one example at
most as much as the rest."""

RELATIVE = 1e-3
"""Tolerance of float32: PyTorch's kernels and other optimization levels differ by up to 5e-7 of the largest output."""
RELATIVE_HALF = 1e-2
"""Tolerance of graphs with 16-bit floats."""
STEPS = 4
"""Tolerance of int8, in steps of the output's scale: the same graph in float arithmetic differs by up to 1 step."""

# Sizes to try for a free axis other than the batch: a deep network needs a long one, and some allow no more than 1.
_FREE_SIZES = (16, 32, 8, 64, 128, 224, 1)
_SMALL = 100  # integers that a graph computes with are from 0 to below this, which every type holds


def bounded_self_test(
    predict: Model,
    values: Mapping[str, np.ndarray],
    examples: Mapping[str, np.ndarray] | None,
    rest_bytes: int,
) -> tuple[SelfTest, bytes] | None:
    """As `self_test`, in proportion to the `rest_bytes` of the rest of the bundle.

    There are fewer examples than ROWS where those would take more than SHARE of it. None, too, where the pseudo-random
    examples would still take more than all of it; given ones are always kept.
    """
    made = self_test(predict, values, examples)
    if made is None:
        return None
    several = max(SHARE * rest_bytes, SMALL_BYTES)
    if len(made[1]) > several:
        made = self_test(predict, values, examples, rows=max(1, int(several * ROWS / len(made[1]))))
    if made is None or (not examples and len(made[1]) > max(rest_bytes, SMALL_BYTES)):
        return None
    return made


def self_test(
    predict: Model,
    values: Mapping[str, np.ndarray] | None = None,
    examples: Mapping[str, np.ndarray] | None = None,
    rows: int = ROWS,
) -> tuple[SelfTest, bytes] | None:
    """Make the test vectors of a `predict` program with the published parameters.

    Arguments:
        predict: a program with the signature of `predict`.
        values: the first values of parameters and state that are inputs of the program, by tensor name.
        examples: an array [examples, ...] for every example input, of which the first `rows` are used, over again
            where there are fewer. None: pseudo-random numbers, the same every time: standard normal ones, and integers
            that the graph's tables accept.
        rows: how many examples there are in the vectors; a program of a fixed batch size gets that many.

    Returns:
        The manifest's entry and the bytes of its file. Its tolerance is RELATIVE of an output's largest element or,
        where the graph quantizes, STEPS steps of the output's scale; integers that are not quantized must be equal.
        None where an example or an output has no batch axis that comes first, where several first axes differ and
        pseudo-random numbers cannot be run, and where the answers to these are not finite.

    Raises:
        ConversionError: the program cannot be run, or its answers to the given examples are not finite.
    """
    if predict.kind != "predict":
        raise ConversionError("self_test: expected a predict program")
    signature = predict.program
    ports = [port for port in signature.inputs if isinstance(port, Example)]
    if not ports or not all(port.shape for port in (*ports, *signature.outputs)):
        return None
    fixed = next((port.shape[0] for port in ports if isinstance(port.shape[0], int)), None)
    count = fixed if isinstance(fixed, int) else rows
    rest = {p.name: _first_value(p, values or {}) for p in signature.inputs if not isinstance(p, Example)}
    choices = _given(ports, examples, count) if examples else _drawn(predict, ports, count)
    try:
        feed, outputs = _answers(predict, ports, rest, choices)
    except ConversionError:
        # The state of a recurrent layer is an input [layers, batch, width]: its first axis is no batch.
        if examples or len({port.shape[0] if isinstance(port.shape[0], int) else None for port in ports}) == 1:
            raise
        return None
    if any(array.ndim == 0 or len(array) != count for array in outputs.values()):
        return None
    for name, array in outputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            if not examples:
                return None
            raise ConversionError(
                f"self_test: output {name!r} of predict is not finite for the examples; give others, or repair the "
                "model"
            )
    rtol, atol = _tolerances(predict, outputs)
    tensors = {f"example/{port.name}": feed[port.name] for port in ports}
    tensors.update({f"output/{name}": array for name, array in outputs.items()})
    entry = SelfTest(file=FILE, rtol=rtol, atol=atol, source="given" if examples else "drawn")
    return entry, write_weights(tensors)


def _answers(
    predict: Model, ports: list[Example], rest: dict[str, np.ndarray], choices: Iterator[dict[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The first choice of examples that the program accepts, and its outputs for them."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the errors say the same
    options.intra_op_num_threads = 1  # so that the order of sums does not depend on the machine's cores
    try:
        session = open_exact(predict.to_bytes(), options)
    except error_types() as error:
        raise ConversionError(f"self_test: ONNX Runtime cannot open predict: {one_line(error)}") from None
    names = [value.name for value in session.get_outputs()]
    problem = ""
    for feed in choices:
        try:
            return feed, dict(zip(names, session.run(names, {**feed, **rest})))
        except error_types() as error:
            problem = one_line(error)
    inputs = ", ".join(f"{port.name!r} ({describe(port)})" for port in ports)
    raise ConversionError(
        f"self_test: predict cannot be run on {inputs}: {problem}; pass self_test= with examples that it accepts"
    )


def _first_value(port: Port, values: Mapping[str, np.ndarray]) -> np.ndarray:
    if isinstance(port, Hyperparameter):
        return np.asarray(port.default, port.dtype)
    init = port.init if isinstance(port, State | Personal) else None
    # `init` is the number that fills the tensor, the name of another tensor, or absent: then its own name counts.
    if isinstance(init, float | int):
        return np.full([int(d) for d in port.shape], init, port.dtype)
    tensor = init or (port.tensor if isinstance(port, Parameter | Personal) else port.name)
    if tensor not in values:
        raise ConversionError(f"self_test: no value for {tensor!r}, which predict reads; there are: {sorted(values)}")
    return np.asarray(values[tensor], port.dtype)


def check_examples(ports: Sequence[Example], examples: Mapping[str, np.ndarray]) -> None:
    """Refuse examples that lack an input, or whose arrays do not fit it. Raises ConversionError."""
    for port in ports:
        array = np.asarray(examples.get(port.name, ()))
        if array.ndim == 0 or not len(array):
            raise ConversionError(
                f"self_test: examples lack {port.name!r} ({describe(port)}); they have {sorted(examples)}"
            )
        if not np.can_cast(array.dtype, port.dtype, "same_kind"):
            raise ConversionError(f"self_test: examples of {port.name!r} are {array.dtype}, expected {port.dtype}")
        sizes = array.shape[1:]
        if len(sizes) != len(port.shape) - 1 or any(
            isinstance(want, int) and want != have for want, have in zip(port.shape[1:], sizes)
        ):
            raise ConversionError(
                f"self_test: examples of {port.name!r} have the shape {list(array.shape)}, expected {describe(port)} "
                "with the examples first"
            )


def _given(ports: list[Example], examples: Mapping[str, np.ndarray], count: int) -> Iterator[dict[str, np.ndarray]]:
    check_examples(ports, examples)
    feed = {}
    for port in ports:
        array = np.asarray(examples[port.name])
        feed[port.name] = array[np.arange(count) % len(array)].astype(port.dtype)
    yield feed


def _drawn(predict: Model, ports: list[Example], count: int) -> Iterator[dict[str, np.ndarray]]:
    free = {d for port in ports for d in port.shape[1:] if isinstance(d, str)}
    bounds = {value.name: _bound(value) for value in predict.ir.graph.inputs}
    for size in _FREE_SIZES if free else _FREE_SIZES[:1]:
        shapes = {port.name: _sized(port.shape, count, size) for port in ports}
        # Integers that look something up in a way that is not seen here: zeros are in every table.
        for zeros in (False, True):
            random = np.random.RandomState(0)  # RandomState, whose numbers are the same in every version of NumPy
            yield {p.name: _numbers(random, p, shapes[p.name], 1 if zeros else bounds[p.name]) for p in ports}


def _sized(shape: tuple[Dim, ...], count: int, size: int) -> tuple[int, ...]:
    return (count, *(d if isinstance(d, int) else size for d in shape[1:]))


def _numbers(random: np.random.RandomState, port: Port, shape: tuple[int, ...], bound: int) -> np.ndarray:
    kind = np.dtype(port.dtype).kind
    if kind == "f":
        return random.standard_normal(shape).astype(port.dtype)
    return random.randint(0, 2 if kind == "b" else bound, shape).astype(port.dtype)


_PASSING = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Expand"}
)


def _bound(value: ir.Value) -> int:
    """A number above all integers that the readers of `value` accept: 1, and so only 0, where the graph does not show.

    An index above a table's size is an error in ONNX Runtime, so the smallest bound of all readers counts.
    """
    bounds: list[int] = []
    for use in value.uses():
        node = use.node
        if node.op_type in _PASSING and use.idx == 0:
            bounds.extend(_bound(output) for output in node.outputs)
        elif node.op_type == "Gather" and use.idx == 1:
            table = node.inputs[0]
            size = None if table is None or table.shape is None else table.shape[node.attributes.get_int("axis", 0)]
            bounds.append(size if isinstance(size, int) else 1)
        elif node.op_type == "OneHot" and use.idx == 0:
            depth = constant_array(node.inputs[1])
            bounds.append(1 if depth is None else int(depth.reshape(())))
        elif node.op_type == "Cast":
            # As integers they may look something up further on; as floats they are numbers.
            to = ir.DataType(node.attributes.get_int("to", 0))
            bounds.append(_bound(node.outputs[0]) if to.is_integer() else _SMALL)
        elif node.op_type in ("Shape", "Size"):
            continue  # reads no element
        else:
            bounds.append(_SMALL if node.op_type == "DequantizeLinear" else 1)
    return max(1, min(bounds, default=1))


def _tolerances(predict: Model, outputs: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """rtol and atol, which the manifest has once for all outputs.

    atol suits the output with the smallest values, but is no less than a tenth of what suits the one with the largest.
    """
    quantized = any(
        node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for node in predict.ir.graph.all_nodes()
    )
    half = any(value.dtype in _HALF for node in predict.ir.graph.all_nodes() for value in node.outputs)
    relative = RELATIVE_HALF if half else RELATIVE
    steps = {str(value.name): _step(value) for value in predict.ir.graph.outputs} if quantized else {}
    inexact = {name: array for name, array in outputs.items() if array.dtype.kind == "f" or steps.get(name)}
    exact = [np.abs(array.astype(np.float64)).max(initial=0) for name, array in outputs.items() if name not in inexact]
    largest = [float(np.abs(array.astype(np.float64)).max(initial=0)) for array in inexact.values()]
    rtol = relative if inexact else 0.0
    atol = max(relative * min(largest), relative / 10 * max(largest), 1e-6) if inexact else 0.0
    # An output that ends in float operators has no scale: 8 bits over its values stand for one.
    for name, peak in zip(inexact, largest):
        if quantized:
            atol = max(atol, STEPS * (steps[name] or peak / 255))
    if exact:  # atol + rtol |x| below 1: a device compares all outputs alike, and integers must not differ by 1
        atol, rtol = min(atol, 0.4), min(rtol, 0.5 / max(1.0, *exact))
    return rtol, atol


_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _step(value: ir.Value) -> float | None:
    """The step of the scale in which an output is quantized last; None if float operators come after."""
    node = trace_back(value, _PASSING).producer()
    if node is None or node.op_type not in ("DequantizeLinear", "QuantizeLinear"):
        return None
    scale = constant_array(node.inputs[1])
    if scale is None:
        return None
    return 1.0 if node.op_type == "QuantizeLinear" else float(scale.max())
