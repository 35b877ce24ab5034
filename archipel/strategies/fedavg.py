"""Federated averaging (McMahan et al. 2017, algorithm 1), with clipped and weighted updates.

Device half: delta = end - start over all parameters, held to an L2 norm of `clip`, times the device's weight
min(examples, weight_cap) / weight_cap. The weight itself is one more entry of the update.
Server half: parameters + server_lr * sum of deltas / sum of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Count, Parameter, Start, Update
from archipel.errors import ConversionError, MissingExtraError
from archipel.protocol.vector import DecodedSum
from archipel.strategies.strategy import Strategy, Tensors, no_broadcast, no_state

if TYPE_CHECKING:
    import onnx

_OPSET, _IR_VERSION = 21, 10
_EXAMPLES, _WEIGHT = "fedavg/examples", "fedavg/weight"


def update(
    parameters: Mapping[str, np.ndarray],
    state: Tensors,
    total: DecodedSum,
    cohort: int,
    hyperparameters: Mapping[str, float],
) -> tuple[Tensors, Tensors]:
    """The weighted mean of the deltas, added to the parameters. Without a weight entry every device weighs 1."""
    weight = float(cohort) if total.weight is None else total.weight
    if weight <= 0:
        # Every survivor had no examples: there is nothing to average, and nothing to divide by.
        return dict(parameters), state
    scale = hyperparameters.get("server_lr", 1.0) / weight
    moved = {name: (array + scale * total.deltas[name]).astype(array.dtype) for name, array in parameters.items()}
    return moved, state


def finish(
    parameters: Mapping[str, np.ndarray],
    *,
    clip: float = 1.0,
    value_range: float | None = None,
    bits: int = 16,
    weight_cap: int = 100,
) -> tuple[onnx.ModelProto, Program]:
    """The `finish` graph: `NAME.start` and `NAME` of every parameter and the count -> `NAME.update`s and the weight.

    `clip` bounds the L2 norm of the whole delta; `value_range` (default: `clip`) bounds one element in the fixed-point
    encoding, whose `bits` it decides the resolution of; a device with `weight_cap` examples or more weighs 1.
    """
    try:
        from onnx import TensorProto, checker, helper, numpy_helper
    except ModuleNotFoundError:
        raise MissingExtraError("onnx", "convert") from None
    if clip <= 0 or weight_cap < 1 or not parameters:
        raise ConversionError(
            f"fedavg: needs clip > 0, weight_cap >= 1 and a trainable parameter; got clip={clip}, "
            f"weight_cap={weight_cap}, {len(parameters)} parameters"
        )
    span = clip if value_range is None else value_range
    nodes, inputs, starts, ends, updates, outputs = [], [], [], [], [], []

    def node(op: str, ins: list[str], out: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, ins, [out], out, **attributes))
        return out

    squares = []
    for name, array in parameters.items():
        if array.dtype != np.float32:
            raise ConversionError(f"fedavg: parameter {name!r} is {array.dtype}; only float32 can be averaged")
        for tensor_name in (f"{name}.start", name):
            inputs.append(helper.make_tensor_value_info(tensor_name, TensorProto.FLOAT, array.shape))
        delta = node("Sub", [name, f"{name}.start"], f"{name}.delta")
        squares.append(node("ReduceSumSquare", [delta], f"{name}.square", keepdims=0))
        starts.append(Start(name=f"{name}.start", tensor=name, dtype="float32", shape=array.shape))
        ends.append(Parameter(name=name, tensor=name, dtype="float32", shape=array.shape))
    # A slash keeps these apart from the parameters' own names: a lone linear layer calls its parameter "weight".
    inputs.append(helper.make_tensor_value_info(_EXAMPLES, TensorProto.INT64, ()))
    constants = {"one": 1.0, "clip": clip, "cap": float(weight_cap), "tiny": 1e-12}
    norm = node("Sqrt", [node("Sum", squares, "fedavg/squares")], "fedavg/norm")
    norm = node("Max", [norm, "fedavg/tiny"], "fedavg/norm_above_zero")
    shrink = node("Min", [node("Div", ["fedavg/clip", norm], "fedavg/ratio"), "fedavg/one"], "fedavg/shrink")
    examples = node("Cast", [_EXAMPLES], "fedavg/examples_float", to=TensorProto.FLOAT)
    capped = node("Min", [examples, "fedavg/cap"], "fedavg/examples_capped")
    factor = node("Mul", [shrink, node("Div", [capped, "fedavg/cap"], _WEIGHT)], "fedavg/factor")
    for name, array in parameters.items():
        entry = node("Mul", [f"{name}.delta", factor], f"{name}.update")
        outputs.append(helper.make_tensor_value_info(entry, TensorProto.FLOAT, array.shape))
        updates.append(
            Update(
                name=entry, tensor=name, dtype="float32", shape=array.shape,
                kind="delta", weighting="examples", range=span, bits=bits, clip=clip,
            )
        )  # fmt: skip
    outputs.append(helper.make_tensor_value_info(_WEIGHT, TensorProto.FLOAT, ()))
    updates.append(
        Update(
            name=_WEIGHT, tensor=_WEIGHT, dtype="float32", shape=(),
            kind="weight", weighting="examples", range=1.0, bits=bits,
        )
    )  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "finish",
        inputs,
        outputs,
        [numpy_helper.from_array(np.array(value, np.float32), f"fedavg/{name}") for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    checker.check_model(model, full_check=True)
    ports = [port for pair in zip(starts, ends, strict=True) for port in pair]
    count = Count(name=_EXAMPLES, dtype="int64", shape=(), of="examples")
    return model, Program(kind="finish", inputs=(*ports, count), outputs=tuple(updates))


STRATEGY = Strategy(
    name="fedavg",
    init=no_state,
    update=update,
    broadcast=no_broadcast,
    finish=finish,
    server_hyperparameters={"server_lr": 1.0},
)
