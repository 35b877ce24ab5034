"""Operators without gradient rules, and forms of others whose derivative nobody needs, for the contract of vmap."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Call:
    """One call of an operator. Lane i of an input has its elements moved by i places along the first axis.

    `constants`: indices of inputs that are initializers; `over`: sets of inputs that get lanes, by default each input
    alone and all together.
    """

    op_type: str
    inputs: tuple[Array | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    outputs: int = 1
    over: tuple[tuple[int, ...], ...] = ()

    @property
    def chosen(self) -> list[tuple[int, ...]]:
        free = [i for i, value in enumerate(self.inputs) if value is not None and i not in self.constants]
        return list(self.over) or [*((i,) for i in free), *([tuple(free)] if len(free) > 1 else [])]

    def model(self) -> onnx.ModelProto:
        """A model of one node, with the types that ONNX's inference finds."""
        names = [f"x{i}" if value is not None else "" for i, value in enumerate(self.inputs)]
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op_type, names, outputs, name="node", **self.attributes)
        given = {f"x{i}": value for i, value in enumerate(self.inputs) if value is not None}
        fixed = [f"x{i}" for i in self.constants]
        graph = helper.make_graph(
            [node],
            "call",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for name, value in given.items()
                if name not in fixed
            ],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(given[name], name) for name in fixed],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(*shape: int, high: int = 5, kind: Any = np.int64) -> Array:
    return RNG.integers(0, high, shape).astype(kind)


def flags(*shape: int) -> Array:
    return RNG.random(shape) > 0.5


def unit(*shape: int) -> Array:
    return (RNG.random(shape) * 1.8 - 0.9).astype(np.float32)


IMAGE = floats(2, 3, 6, 5)
POINT = (np.array(0.1, np.float32), np.array(2, np.uint8))
QUANTIZED = (whole(1, 2, 5, 5, kind=np.uint8), *POINT)
CALLS = [
    *(Call(name, (floats(2, 3), floats(3))) for name in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")),
    Call("Equal", (whole(2, 3), whole(3))),
    *(Call(name, (flags(2, 3), flags(3))) for name in ("And", "Or", "Xor")),
    *(Call(name, (whole(2, 3, kind=np.uint32), whole(3, kind=np.uint32))) for name in ("BitwiseAnd", "BitwiseXor")),
    Call("BitwiseOr", (whole(2, 3, kind=np.uint8), whole(1, kind=np.uint8))),
    Call("BitShift", (whole(2, 3, kind=np.uint32), whole(3, kind=np.uint32)), {"direction": "RIGHT"}),
    Call("Mod", (whole(2, 3), whole(3) + 1)),
    Call("Mod", (floats(2, 3), floats(3) + 5), {"fmod": 1}),
    Call("Not", (flags(2, 3),)),
    Call("BitwiseNot", (whole(2, 3, kind=np.uint32),)),
    *(Call(name, (floats(2, 3),)) for name in ("IsNaN", "IsInf", "Sinh", "Asinh", "Tan", "Atan", "Cosh", "Shrink")),
    *(Call(name, (unit(2, 3),)) for name in ("Acos", "Asin", "Atanh")),
    Call("Acosh", (np.abs(floats(2, 3)) + 1.5,)),
    Call("ThresholdedRelu", (floats(2, 3),), {"alpha": 0.3}),
    Call("Hardmax", (floats(2, 3),), {"axis": 0}),
    Call("Cast", (floats(2, 3) * 5,), {"to": 7}),
    Call("CastLike", (floats(2, 3) * 5, whole(1))),
    *(
        Call(name, (floats(2, 3, 4),), {"axis": a, "keepdims": k})
        for name, a, k in (("ArgMax", 1, 0), ("ArgMin", -1, 1))
    ),
    Call("ArgMax", (floats(2, 3),)),
    Call("Shape", (floats(2, 3, 4),), {"start": 1}),
    Call("Size", (floats(2, 3),)),
    Call("TopK", (floats(2, 5), np.array([2])), {"axis": 0, "largest": 0}, constants=(1,), outputs=2, over=((0,),)),
    Call("OneHot", (whole(2, 3), np.array(5), floats(2)), {"axis": 1}, constants=(1,)),
    Call("EyeLike", (floats(3, 4),), {"k": 1}),
    Call("ReduceProd", (floats(2, 3, 4), np.array([-1, 0])), constants=(1,)),
    Call("ReduceMax", (whole(2, 3, kind=np.int32),), {"keepdims": 0}),
    Call("MaxPool", (IMAGE,), {"kernel_shape": [2, 2], "strides": [2, 2]}, outputs=2),
    Call("LpPool", (IMAGE,), {"kernel_shape": [2, 2], "p": 2}),
    Call("GlobalLpPool", (IMAGE,), {"p": 2}),
    Call("LRN", (IMAGE,), {"size": 3}),
    Call("GridSample", (IMAGE, unit(2, 4, 4, 2)), {"align_corners": 0}),
    Call("AffineGrid", (floats(2, 2, 3), np.array([2, 3, 4, 5])), constants=(1,)),
    Call(
        "RoiAlign",
        (IMAGE, np.array([[0, 0, 3, 3], [1, 1, 4, 4]], np.float32), np.array([0, 1])),
        over=((0,), (0, 1, 2)),
    ),
    Call("Col2Im", (floats(2, 8, 6), np.array([3, 4]), np.array([2, 2])), constants=(1, 2)),
    Call("CenterCropPad", (floats(4, 5), np.array([2, 7])), constants=(1,)),
    Call("Det", (floats(2, 3, 3),)),
    Call("ReverseSequence", (floats(4, 3, 2), np.array([1, 4, 2])), {"time_axis": 0, "batch_axis": 1}),
    Call("ReverseSequence", (floats(3, 4, 2), np.array([1, 4, 2])), {"time_axis": 1, "batch_axis": 0}),
    Call("Bernoulli", ((floats(2, 3) > 0).astype(np.float32),)),
    Call("DFT", (floats(2, 5, 1), None, np.array(1)), constants=(2,)),
    Call("MatMulInteger", (whole(2, 3, kind=np.uint8), whole(3, 4, kind=np.uint8), np.array(1, np.uint8))),
    Call("ConvInteger", (whole(1, 2, 5, 5, kind=np.uint8), whole(3, 2, 3, 3, kind=np.uint8))),
    Call(
        "QLinearMatMul", (whole(2, 3, kind=np.uint8), *POINT, whole(3, 4, kind=np.uint8), *POINT, *POINT), over=((0,),)
    ),
    Call("QLinearConv", (*QUANTIZED, whole(3, 2, 3, 3, kind=np.uint8), *POINT, *POINT), over=((0,), (3,))),
    Call("DynamicQuantizeLinear", (floats(2, 3),), outputs=3),
    Call("QuantizeLinear", (floats(2, 3), np.array(0.1, np.float32), np.array(3, np.uint8))),
    Call("QuantizeLinear", (floats(2, 3), np.array([0.1, 0.2, 0.3], np.float32), whole(3, kind=np.int8)), {"axis": 1}),
    Call("Slice", (floats(4, 4), np.array([0, 2]), np.array([2, 4])), over=((0,), (1, 2), (0, 1, 2))),
    Call("Pad", (floats(2, 3), np.array([1, 0, 0, 1]), np.array(0.5, np.float32)), constants=(1,)),
    Call("Clip", (floats(2, 3), np.array(-0.5, np.float32), np.array(0.5, np.float32))),
    Call("Gather", (floats(2, 4, 3), whole(2, 2, high=4, kind=np.int32)), {"axis": 1}),
    Call("Trilu", (floats(3, 4), np.array(1))),
    Call("Where", (flags(2, 1), whole(3), whole(2, 3))),
    Call(
        "Conv",
        (IMAGE, floats(4, 3, 3, 3), floats(4)),
        {"pads": [1, 1, 1, 1]},
        over=((0,), (1,), (2,), (0, 1), (0, 1, 2)),
    ),
    Call("Conv", (IMAGE, floats(6, 1, 3, 3), floats(6)), {"group": 3}, over=((1,), (0, 1), (0, 2))),
    Call(
        "ConvTranspose", (IMAGE, floats(3, 4, 3, 3), floats(4)), {"strides": [2, 2]}, over=((0,), (1,), (0, 1), (1, 2))
    ),
    Call("ConvTranspose", (IMAGE, floats(3, 2, 2, 2)), {"group": 3}, over=((1,), (0, 1))),
    Call("Gemm", (floats(3, 2), floats(4, 2), floats(4)), {"transB": 1}, over=((0,), (1,), (2,), (0, 1, 2))),
    Call("Gemm", (floats(2, 3), floats(2, 4), floats(3, 1)), {"transA": 1, "alpha": 0.5, "beta": 2.0}),
    Call("MatMul", (floats(3), floats(2, 3, 4))),
    Call("MatMul", (floats(2, 1, 4, 3), floats(3))),
    Call("BatchNormalization", (IMAGE, floats(3), floats(3), unit(3) + 2, unit(3) + 2)),
    Call("LayerNormalization", (floats(2, 3, 4), floats(4), floats(4))),
    Call("InstanceNormalization", (IMAGE, floats(3), floats(3))),
    Call("Resize", (IMAGE, None, None, np.array([2, 3, 4, 9])), {"mode": "linear"}, constants=(3,)),
    Call("ScatterND", (floats(4, 3), whole(2, 1, high=4), floats(2, 3)), {"reduction": "add"}),
    Call("GatherND", (floats(2, 4, 3), whole(2, 1, high=4)), {"batch_dims": 1}),
    Call("Einsum", (floats(2, 3), floats(3, 4)), {"equation": "ij, jk"}),
    Call("Flatten", (floats(2, 3, 4),), {"axis": -1}),
    Call("Concat", (floats(2, 3), floats(1, 3)), {"axis": 0}),
]
