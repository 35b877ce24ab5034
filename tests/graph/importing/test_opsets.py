"""Models of other opsets arrive with the meaning they had, or are refused: ONNX Runtime runs them before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.errors import ModelImportError
from archipel.graph import check_model

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 6, 8)).astype(np.float32)
FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


@dataclass
class Old:
    """One node of an opset; `constants` are initializers, `types` those of the outputs."""

    opset: int
    op_type: str
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, np.ndarray] = field(default_factory=lambda: {"x": X})
    types: tuple[int, ...] = (FLOAT,)

    def __str__(self) -> str:
        given = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op_type}-{self.opset}({given})"

    def model(self, free: bool = False, inside: bool = False) -> onnx.ModelProto:
        """`free`: sizes are symbolic. `inside`: the node is in both branches of an If."""
        ports = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(a.dtype),
                [f"{name}{i}" for i in range(a.ndim)] if free else a.shape,
            )
            for name, a in self.inputs.items()
        ]
        names = [f"y{i}" for i in range(len(self.types))]
        node = helper.make_node(self.op_type, [*self.inputs, *self.constants], names, name="n", **self.attributes)
        outputs = [helper.make_tensor_value_info(name, t, None) for name, t in zip(names, self.types)]
        weights = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        if inside:
            branch = helper.make_graph([node], "branch", [], outputs)
            node = helper.make_node("If", ["condition"], names, then_branch=branch, else_branch=branch)
            ports.append(helper.make_tensor_value_info("condition", BOOL, []))
        graph = helper.make_graph([node], "old", ports, outputs, weights)
        imports = [helper.make_opsetid("", self.opset)]
        model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=imports, ir_version=8))
        for output in model.graph.output:  # the rank, which exporters declare, and no more
            shape = output.type.tensor_type.shape
            rank = len(shape.dim) or next(iter(self.inputs.values())).ndim
            del shape.dim[:]
            for axis in range(rank):
                shape.dim.add().dim_param = f"{output.name}_{axis}"
        return model


def run(model: onnx.ModelProto | bytes, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    data = model if isinstance(model, bytes) else model.SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, feed)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


CHANNELS = {name: RNG.random(4).astype(np.float32) + 0.1 for name in ("scale", "b", "mean", "var")}
REDUCTIONS = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare"]
ONE = {"x": X[:1]}
KERNEL = RNG.standard_normal((4, 2, 3, 3)).astype(np.float32)
OLD = [
    *(Old(v, op, {"axis": a}) for v in (7, 11, 12) for op in ("Softmax", "LogSoftmax") for a in (0, 1, 2, 3)),
    *(Old(v, op) for v in (7, 12) for op in ("Softmax", "LogSoftmax")),
    Old(11, "Softmax", {"axis": -2}),
    *(Old(v, f"Reduce{r}", {"axes": [1, 3], "keepdims": 0}) for v in (7, 11) for r in REDUCTIONS),
    *(Old(v, f"Reduce{r}") for v in (7, 11) for r in REDUCTIONS),
    *(Old(v, op, {"axes": [-1]}) for v in (13, 17) for op in ("ReduceMean", "ReduceL2", "ReduceMax")),
    Old(7, "Clip", {"min": -0.5, "max": 0.5}), Old(7, "Clip", {"min": -0.5}), Old(10, "Clip", {"max": 0.5}),
    Old(7, "Clip"), Old(7, "Dropout", {"ratio": 0.3}), Old(10, "Dropout"),
    *(Old(v, "Pad", {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "value": 1.5}) for v in (7, 10)),
    Old(7, "Pad", {"pads": [0, 0, -1, 2, 0, 0, 3, 0], "mode": "reflect"}),
    *(Old(v, "Slice", {"starts": [1, 0], "ends": [100, -2], "axes": [2, 3]}) for v in (7, 9)),
    Old(7, "Slice", {"starts": [1, 0], "ends": [100, -2]}),
    *(Old(v, "Split", {"axis": 3}, types=(FLOAT, FLOAT)) for v in (7, 11, 13, 17)),
    *(Old(v, "Split", {"axis": 3, "split": [3, 5]}, types=(FLOAT, FLOAT)) for v in (7, 11)),
    Old(13, "Split", {"axis": 3}, {"split": ints(3, 5)}, types=(FLOAT, FLOAT)),
    Old(7, "TopK", {"k": 3}, types=(FLOAT, INT64)), Old(9, "TopK", {"k": 3, "axis": 2}, types=(FLOAT, INT64)),
    Old(10, "TopK", {"axis": 2}, {"k": ints(3)}, types=(FLOAT, INT64)),
    *(Old(7, "Upsample", {"mode": m, "scales": s}) for m in ("nearest", "linear")
      for s in ([1.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.5, 2.3])),
    *(Old(9, "Upsample", {"mode": m}, {"scales": floats(1, 1, *s)}) for m in ("nearest", "linear")
      for s in ((2, 3), (1.5, 2.3))),
    *(Old(10, "Resize", {"mode": m}, {"scales": floats(1, 1, *s)}) for m in ("nearest", "linear")
      for s in ((2, 3), (1.7, 2.4), (0.5, 0.5), (0.7, 0.4))),
    *(Old(v, "Resize", {"mode": m, **c}, {"roi": floats(), "scales": floats(1, 1, 2, 0.6)})
      for v in (11, 13, 18) for m in ("nearest", "linear", "cubic")
      for c in ({}, {"coordinate_transformation_mode": "align_corners"})),
    Old(11, "Resize", {"mode": "linear"}, {"roi": floats(), "scales": floats(), "sizes": ints(2, 4, 7, 9)}),
    *(Old(v, "BatchNormalization", {"epsilon": 1e-3}, CHANNELS) for v in (7, 9, 14)),
    Old(14, "BatchNormalization", {"training_mode": 1}, CHANNELS, types=(FLOAT,) * 3),
    *(Old(v, "GroupNormalization", {"num_groups": 2}, {"scale": floats(1, 2), "b": floats(3, 4)}) for v in (18, 20)),
    *(Old(v, "Unsqueeze", {"axes": [0]}) for v in (7, 11)),
    *(Old(v, "Squeeze", {"axes": [0]}, inputs=ONE) for v in (7, 11)),
    *(Old(v, "AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}) for v in (7, 10, 11)),
    Old(7, "MaxPool", {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"}),
    *(Old(v, "ConvTranspose", {"auto_pad": a, "strides": [2, 2]}, {"w": KERNEL}) for v in (7, 10)
      for a in ("SAME_UPPER", "VALID")),
    *(Old(v, "DepthToSpace", {"blocksize": 2}) for v in (7, 11)),
    *(Old(16, "GridSample", {"mode": m}, {"grid": RNG.uniform(-1, 1, (2, 3, 3, 2)).astype(np.float32)})
      for m in ("bilinear", "bicubic", "nearest")),
    Old(10, "RoiAlign", {"output_height": 2, "output_width": 2}, {"rois": floats(0, 0, 5, 5)[None], "i": ints(0)}),
    Old(9, "Scatter", {}, {"indices": ints(0, 1, 1)[None, None, None], "updates": floats(1, 2, 3)[None, None, None]}),
    Old(7, "Gemm", {"alpha": 0.5}, inputs={"a": X[0, 0], "b": X[0, 0].T.copy(), "g": X[0, 0, :, :1].T.copy()}),
]  # fmt: skip


@pytest.mark.parametrize("old", OLD, ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["", "inside"])
@pytest.mark.parametrize("free", [False, True], ids=["", "free"])
def test_older_operators_mean_the_same(old: Old, free: bool, inside: bool) -> None:
    proto = old.model(free, inside)
    before = proto.SerializeToString()
    model = Model.from_proto(proto)
    assert proto.SerializeToString() == before  # what is given is left as it was
    check_model(model.ir)
    feed = {**old.inputs, **({"condition": np.array(True)} if inside else {})}
    if old.op_type == "GroupNormalization":  # ONNX Runtime never had it; onnx.reference is of the form since 21
        scale, bias = (np.repeat(old.constants[name], 2) for name in ("scale", "b"))
        groups = X.reshape(2, 2, -1)
        y = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
        expected = [y.reshape(X.shape) * scale[:, None, None] + bias[:, None, None]]
    else:
        expected = run(proto, feed)
    found = run(model.to_bytes(), feed)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


TF = {"mode": "nearest", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}
REFUSED = [
    (Old(9, "BatchNormalization", {}, CHANNELS, types=(FLOAT,) * 5), "is in training mode"),
    (Old(7, "BatchNormalization", {"spatial": 0}, dict.fromkeys(CHANNELS, X[0])), "statistics for each position"),
    (Old(10, "Dropout", types=(FLOAT, BOOL)), "its mask 'y1' is used"),
    (Old(7, "Dropout", types=(FLOAT, FLOAT)), "its mask 'y1' is used"),
    (Old(11, "Resize", TF, {"roi": floats(), "scales": floats(1, 1, 2, 2)}), "tf_half_pixel_for_nn"),
    (Old(10, "Resize", {}, {"scales": floats(1, 1, 2, 0.5)}), "shrink one axis and enlarge another"),
    (Old(10, "Resize", inputs={"x": X, "scales": floats(1, 1, 2, 2)}), "scales are computed"),
    (Old(12, "Hardmax"), "flattened matrix"),
    (Old(6, "PRelu", {}, {"slope": floats(1, 2, 3, 4)}), "slopes along the channels"),
    (Old(6, "Dropout"), "is in training mode"),
    (Old(26, "CumProd", {}, {"axis": ints(1).reshape(())}), "does not exist in opset 21"),
    (Old(28, "Mod", {}, {"b": floats(2)}), r"fmod=0 of tensor\(float\) is not defined in opset 21"),
    (Old(22, "MaxPool", {"kernel_shape": [1, 1], "strides": [9, 9], "pads": [0, 0, 0, 9], "ceil_mode": 1}),
     "last window of axis 2 lies in the padding"),
    (Old(28, "BitShift", {"direction": "LEFT"}, {"b": np.array([1], np.int32)},
         {"x": np.ones(3, np.int32)}, (TensorProto.INT32,)), r"'x' is tensor\(int32\), which BitShift does not take"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "message"), REFUSED, ids=[str(old) for old, _ in REFUSED])
def test_what_cannot_come_along_is_refused(old: Old, message: str) -> None:
    with pytest.raises(ModelImportError, match=message) as caught:
        Model.from_proto(old.model(free=old.op_type not in ("Mod", "BitShift", "MaxPool")))
    assert old.op_type in str(caught.value)


def test_newer_types_are_refused_by_name() -> None:
    text = """<ir_version: 10, opset_import: ["" : 25]>
    agraph (bfloat16[1, 2, 5, 5] x, bfloat16[2, 2, 3, 3] w) => (bfloat16[1, 2, 3, 3] y) { y = Conv (x, w) }"""
    with pytest.raises(ModelImportError, match=r"Conv '.*': 'x' is tensor\(bfloat16\).*one of tensor\(double\)"):
        Model.from_proto(onnx.parser.parse_model(text))


def test_attributes_of_newer_versions() -> None:
    """At their default, or without effect on the types of the internal opset, they go; otherwise they are refused."""
    text = """<ir_version: 10, opset_import: ["" : 25]>
    agraph (float[3] x, uint8[3] q) => (double[3] y, OUTPUT[3] z) <float s = {0.5}> {
        y = Cast <to = 11, round_mode = "down"> (x)  z = DequantizeLinear <output_dtype = TYPE> (q, s)
    }"""
    model = Model.from_proto(onnx.parser.parse_model(text.replace("OUTPUT", "float").replace("TYPE", "0")))
    check_model(model.ir)
    with pytest.raises(ModelImportError, match=r"DequantizeLinear '.*' \(opset 25\) has no attribute output_dtype"):
        Model.from_proto(onnx.parser.parse_model(text.replace("OUTPUT", "float16").replace("TYPE", "10")))


NEW = {
    "Swish": "y = Swish (x)",
    "Swish with alpha": "y = Swish <alpha = 1.5> (x)",
    "in a branch": """y = If (c) <then_branch = t () => (float[2, 4, 8] a) { a = Swish (x) },
                                  else_branch = e () => (float[2, 4, 8] b) { b = Neg (x) }>""",
    "RMSNormalization": "e = Exp (x)  y = RMSNormalization <axis = -1> (e, s)",
    "Attention": "y = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x)",
    "inputs left out": "y = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (x, x, x, , )",
}


@pytest.mark.parametrize("case", NEW)
@pytest.mark.parametrize("batch", ["2", "batch"])
def test_newer_operators_are_expanded(case: str, batch: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    agraph (float[{batch}, 4, 8] x, bool c) => (float[{batch}, 4, 8] y) <float[8] s = {{1, 2, 3, 4, 5, 6, 7, 8}}>
    {{ {NEW[case]} }}"""
    proto = onnx.parser.parse_model(text)
    model = Model.from_proto(proto)
    check_model(model.ir)
    feed = {"x": X[0, :2, :4, :], "c": np.array(True)}
    expected = ReferenceEvaluator(proto).run(None, feed)[0]
    np.testing.assert_allclose(run(model.to_bytes(), feed)[0], expected, rtol=1e-5, atol=1e-6)
