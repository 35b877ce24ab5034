"""Every rule against ONNX Runtime: where it finds rows, an example's row does not depend on the other examples."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from archipel.converter.frozen import arithmetic, layout
from archipel.converter.frozen.proof import batch_axes
from archipel.converter.frozen.rows import Rows
from archipel.converter.frozen.sizes import fold_sizes
from archipel.graph.build import Builder
from archipel.graph.shapes import dtype_of

X = "float[batch, 3, 4] x"
PICTURE = "float[batch, 4, 6, 6] x"
FLAT = "float[batch, 4] x"
NONE = None  # must not be proven


def words(text: str) -> list[str]:
    return text.split()


UNARY = words(
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity "
    "IsInf IsNaN LeakyRelu Log Mish Neg Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt "
    "Tan Tanh ThresholdedRelu"
)
REDUCTIONS = words(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)
BINARY = words("Add Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mul PRelu Pow Sub Sum")

# (operator, input, body, rows of y)
CASES: list[tuple[str, str, str, Rows | None]] = [
    *((op, X, f"y = {op}(x)", Rows(0)) for op in UNARY),
    *((op, X, f"c = Constant<value = float[4] {{1, 2, 3, 4}}>() y = {op}(x, c)", Rows(0)) for op in BINARY),
    ("Add", X, "r = Relu(x) y = Add(r, x)", Rows(0)),
    ("Add", FLAT, "t = Transpose(x) y = Add(t, t)", Rows(1)),
    ("Add", "float[batch, 1] x", "t = Transpose(x) y = Add(t, x)", NONE),  # all pairs of examples
    ("Add", "float[1, 4] x", "c = Constant<value = float[3, 1] {1, 2, 3}>() y = Add(x, c)", NONE),
    ("Add", "float[3, 4] x", "c = Constant<value = float[3, 1] {1, 2, 3}>() y = Add(x, c)", NONE),  # by position
    ("Add", "float[3, 4] x", "c = Constant<value = float[1, 4] {1, 2, 3, 4}>() y = Add(x, c)", Rows(0)),
    ("Where", X, "q = Greater(x, x) y = Where(q, x, x)", Rows(0)),
    ("Clip", X, "a = Constant<value = float {-1}>() b = Constant<value = float {1}>() y = Clip(x, a, b)", Rows(0)),
    ("Cast", X, "y = Cast<to = 7>(x)", Rows(0)),
    ("CastLike", X, "c = Constant<value = int64 {1}>() y = CastLike(x, c)", Rows(0)),
    ("And", "bool[batch, 3] x", "y = And(x, x)", Rows(0)),
    ("Or", "bool[batch, 3] x", "y = Or(x, x)", Rows(0)),
    ("Xor", "bool[batch, 3] x", "y = Xor(x, x)", Rows(0)),
    ("Not", "bool[batch, 3] x", "y = Not(x)", Rows(0)),
    ("BitwiseAnd", "int64[batch, 3] x", "y = BitwiseAnd(x, x)", Rows(0)),
    ("BitwiseOr", "int64[batch, 3] x", "y = BitwiseOr(x, x)", Rows(0)),
    ("BitwiseXor", "int64[batch, 3] x", "y = BitwiseXor(x, x)", Rows(0)),
    ("BitwiseNot", "int64[batch, 3] x", "y = BitwiseNot(x)", Rows(0)),
    ("Mod", "int64[batch, 3] x", "c = Constant<value = int64 {3}>() y = Mod(x, c)", Rows(0)),
    ("BitShift", "uint32[batch, 3] x", "y = BitShift<direction = \"LEFT\">(x, x)", Rows(0)),
    ("Conv", PICTURE, "w = Constant<value = float[2, 4, 1, 1] {1, 2, 3, 4, 5, 6, 7, 8}>() y = Conv(x, w)", Rows(0)),
    ("ConvTranspose", PICTURE,
     "w = Constant<value = float[4, 2, 1, 1] {1, 2, 3, 4, 5, 6, 7, 8}>() y = ConvTranspose(x, w)", Rows(0)),
    ("Conv", PICTURE, "p = GlobalAveragePool(x) y = Conv(x, p)", NONE),  # the batch as filters
    *((op, PICTURE, f"y = {op}(x)", Rows(0)) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")),
    *((op, PICTURE, f"y = {op}<kernel_shape = [2, 2]>(x)", Rows(0)) for op in ("AveragePool", "MaxPool", "LpPool")),
    ("MaxPool", PICTURE, "v, y = MaxPool<kernel_shape = [2, 2]>(x)", NONE),  # indices count over the whole batch
    ("LRN", PICTURE, "y = LRN<size = 3>(x)", Rows(0)),
    ("DepthToSpace", PICTURE, "y = DepthToSpace<blocksize = 2>(x)", Rows(0)),
    ("SpaceToDepth", PICTURE, "y = SpaceToDepth<blocksize = 2>(x)", Rows(0)),
    ("GroupNormalization", PICTURE,
     "c = Constant<value = float[4] {1, 2, 3, 4}>() y = GroupNormalization<num_groups = 2>(x, c, c)", Rows(0)),
    ("InstanceNormalization", PICTURE,
     "c = Constant<value = float[4] {1, 2, 3, 4}>() y = InstanceNormalization(x, c, c)", Rows(0)),
    ("BatchNormalization", PICTURE,
     "c = Constant<value = float[4] {1, 2, 3, 4}>() y = BatchNormalization(x, c, c, c, c)", Rows(0)),
    ("BatchNormalization", PICTURE, "c = Constant<value = float[4] {1, 2, 3, 4}>() "
     "y, m, v = BatchNormalization<training_mode = 1>(x, c, c, c, c)", NONE),
    ("STFT", "float[batch, 16, 1] x", "s = Constant<value = int64 {4}>() l = Constant<value = int64 {8}>() "
     "y = STFT(x, s, , l)", Rows(0)),
    ("Dropout", X, "y = Dropout(x)", Rows(0)),
    ("Dropout", X, "r = Constant<value = float {0.5}>() t = Constant<value = bool {1}>() y = Dropout(x, r, t)", NONE),
    ("QuantizeLinear", X, "s = Constant<value = float {0.1}>() y = QuantizeLinear(x, s)", Rows(0)),
    ("DequantizeLinear", "uint8[batch, 3] x",
     "s = Constant<value = float[3] {0.1, 1, 2}>() y = DequantizeLinear<axis = 1>(x, s)", Rows(0)),
    ("DequantizeLinear", "uint8[3, 3] x",
     "s = Constant<value = float[3] {0.1, 1, 2}>() y = DequantizeLinear<axis = 0>(x, s)", NONE),
    ("Gemm", FLAT, "w = Constant<value = float[1, 4] {1, 2, 3, 4}>() y = Gemm<transB = 1>(x, w)", Rows(0)),
    ("Gemm", FLAT, "t = Transpose(x) w = Constant<value = float[1, 4] {1, 2, 3, 4}>() "
     "y = Gemm<transA = 1, transB = 1>(t, w)", Rows(0)),
    ("Gemm", FLAT, "y = Gemm<transB = 1>(x, x)", NONE),
    ("Gemm", FLAT, "y = Gemm<transA = 1>(x, x)", NONE),  # a sum over examples
    ("Gemm", "float[3, 4] x", "w = Constant<value = float[4, 1] {1, 2, 3, 4}>() "
     "c = Constant<value = float[3, 1] {1, 2, 3}>() y = Gemm(x, w, c)", NONE),
    ("MatMul", X, "w = Constant<value = float[4, 2] {1, 2, 3, 4, 5, 6, 7, 8}>() y = MatMul(x, w)", Rows(0)),
    ("MatMul", FLAT, "w = Constant<value = float[4, 2] {1, 2, 3, 4, 5, 6, 7, 8}>() y = MatMul(x, w)", Rows(0)),
    ("MatMul", FLAT, "w = Constant<value = float[4] {1, 2, 3, 4}>() y = MatMul(x, w)", Rows(0)),
    ("MatMul", FLAT, "t = Transpose(x) w = Constant<value = float[2, 4] {1, 2, 3, 4, 5, 6, 7, 8}>() "
     "y = MatMul(w, t)", Rows(1)),
    ("MatMul", X, "t = Transpose<perm = [0, 2, 1]>(x) y = MatMul(x, t)", Rows(0)),
    ("MatMul", FLAT, "t = Transpose(x) y = MatMul(x, t)", NONE),
    ("MatMul", FLAT, "t = Transpose(x) y = MatMul(t, x)", NONE),
    ("Einsum", X, "w = Constant<value = float[4, 2] {1, 2, 3, 4, 5, 6, 7, 8}>() "
     "y = Einsum<equation = \"bij,jk->bik\">(x, w)", Rows(0)),
    ("Einsum", X, "y = Einsum<equation = \"bij,bkj->ikb\">(x, x)", Rows(2)),
    ("Einsum", X, "y = Einsum<equation = \"bij,cij->bc\">(x, x)", NONE),
    ("Einsum", X, "y = Einsum<equation = \"bij->ij\">(x)", NONE),
    ("Reshape", X, "s = Constant<value_ints = [-1, 12]>() y = Reshape(x, s)", Rows(0)),
    ("Reshape", X, "s = Constant<value_ints = [0, -1]>() y = Reshape(x, s)", Rows(0)),
    ("Reshape", X, "s = Constant<value_ints = [-1, 4]>() y = Reshape(x, s)", Rows(0, 3)),
    ("Reshape", X, "s = Constant<value_ints = [-1, 4]>() r = Constant<value_ints = [-1, 3, 4]>() a = Reshape(x, s) "
     "b = Relu(a) y = Reshape(b, r)", Rows(0)),
    ("Reshape", X, "s = Constant<value_ints = [12, -1]>() y = Reshape(x, s)", NONE),
    ("Reshape", X, "s = Constant<value_ints = [-1, 24]>() y = Reshape(x, s)", NONE),  # two examples a row
    ("Reshape", X, "t = Transpose<perm = [1, 0, 2]>(x) s = Constant<value_ints = [-1, 4]>() y = Reshape(t, s)", NONE),
    ("Reshape", X, "t = Transpose<perm = [1, 0, 2]>(x) s = Constant<value_ints = [3, -1, 2, 2]>() y = Reshape(t, s)",
     Rows(1)),
    ("Flatten", X, "y = Flatten(x)", Rows(0)),
    ("Flatten", X, "y = Flatten<axis = 2>(x)", NONE),
    ("Expand", "float[batch, 1] x", "s = Constant<value_ints = [1, 3]>() y = Expand(x, s)", Rows(0)),
    ("Expand", FLAT, "s = Shape<start = 0, end = 1>(x) d = Constant<value_ints = [2]>() r = Concat<axis = 0>(s, d) "
     "c = Constant<value = float[1, 2] {1, 2}>() y = Expand(c, r)", Rows(0)),
    ("Expand", "float[batch, 1] x", "s = Shape<start = 0, end = 1>(x) r = Concat<axis = 0>(s, s) y = Expand(x, r)",
     NONE),  # an example's row is as long as the batch
    ("ConstantOfShape", FLAT, "s = Shape(x) y = ConstantOfShape(s)", Rows(0)),
    ("Transpose", X, "y = Transpose<perm = [1, 2, 0]>(x)", Rows(2)),
    ("Transpose", X, "y = Transpose(x)", Rows(2)),
    ("Squeeze", "float[1, batch, 1, 3] x", "a = Constant<value_ints = [0, -2]>() y = Squeeze(x, a)", NONE),  # axis 0
    ("Squeeze", "float[batch, 1, 3] x", "t = Transpose<perm = [1, 0, 2]>(x) a = Constant<value_ints = [0]>() "
     "y = Squeeze(t, a)", Rows(0)),
    ("Squeeze", "float[1, 3] x", "a = Constant<value_ints = [0]>() y = Squeeze(x, a)", NONE),
    ("Unsqueeze", FLAT, "a = Constant<value_ints = [0, -1]>() y = Unsqueeze(x, a)", Rows(1)),
    ("Concat", X, "y = Concat<axis = -1>(x, x)", Rows(0)),
    ("Concat", X, "y = Concat<axis = 0>(x, x)", NONE),
    ("Split", X, "y, z = Split<axis = 2, num_outputs = 2>(x)", Rows(0)),
    ("Split", "float[4, 2] x", "y, z = Split<axis = 0, num_outputs = 2>(x)", NONE),
    ("Slice", X, "a = Constant<value_ints = [1]>() b = Constant<value_ints = [3]>() y = Slice(x, a, b, a)", Rows(0)),
    ("Slice", X, "a = Constant<value_ints = [1]>() b = Constant<value_ints = [3]>() y = Slice(x, a, b)", NONE),
    ("Slice", "float[batch, 9] x", "a = Constant<value_ints = [0]>() n = Shape<start = 0, end = 1>(x) "
     "o = Constant<value_ints = [1]>() y = Slice(x, a, n, o)", NONE),  # as many columns as examples
    ("Pad", FLAT, "p = Constant<value_ints = [0, 1, 0, 2]>() y = Pad(x, p)", Rows(0)),
    ("Pad", FLAT, "p = Constant<value_ints = [1, 0, 0, 0]>() y = Pad(x, p)", NONE),
    ("Tile", FLAT, "r = Constant<value_ints = [1, 2]>() y = Tile(x, r)", Rows(0)),
    ("Tile", FLAT, "r = Constant<value_ints = [2, 1]>() y = Tile(x, r)", NONE),
    ("Gather", X, "i = Constant<value_ints = [2, 0]>() y = Gather<axis = 1>(x, i)", Rows(0)),
    ("Gather", X, "t = Transpose<perm = [1, 0, 2]>(x) i = Constant<value = int64 {1}>() y = Gather(t, i)", Rows(0)),
    ("Gather", X, "i = Constant<value_ints = [0]>() y = Gather<axis = 0>(x, i)", NONE),
    ("Gather", "int64[batch, 2] x",
     "w = Constant<value = float[3, 2] {1, 2, 3, 4, 5, 6}>() y = Gather(w, x)", Rows(0)),
    ("GatherElements", "int64[batch, 3] x", "y = GatherElements<axis = 1>(x, x)", Rows(0)),
    ("GatherElements", "int64[3, 3] x", "y = GatherElements<axis = 0>(x, x)", NONE),
    ("Trilu", "float[batch, 3, 3] x", "y = Trilu(x)", Rows(0)),
    ("Trilu", "float[batch, 3] x", "y = Trilu(x)", NONE),  # by the number of the row
    *((op, X, f"y = {op}<axis = -1>(x)", Rows(0)) for op in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")),
    *((op, X, f"y = {op}<axis = 0>(x)", NONE) for op in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")),
    ("TopK", X, "k = Constant<value_ints = [2]>() v, y = TopK(x, k)", Rows(0)),
    ("TopK", X, "k = Constant<value_ints = [1]>() y, i = TopK<axis = 0>(x, k)", NONE),
    ("CumSum", X, "a = Constant<value = int64 {1}>() y = CumSum(x, a)", Rows(0)),
    ("CumSum", X, "a = Constant<value = int64 {0}>() y = CumSum(x, a)", NONE),
    *((op, X, f"a = Constant<value_ints = [1]>() y = {op}<keepdims = 0>(x, a)", Rows(0)) for op in REDUCTIONS),
    ("ReduceMean", X, "a = Constant<value_ints = [0]>() y = ReduceMean(x, a)", NONE),
    ("ReduceMean", X, "y = ReduceMean(x)", NONE),
    ("ReduceSum", "float[4, 4] x", "a = Constant<value_ints = [0]>() y = ReduceSum<keepdims = 0>(x, a)", NONE),
    ("ReduceSum", X, "t = Transpose<perm = [1, 0, 2]>(x) a = Constant<value_ints = [0]>() "
     "y = ReduceSum<keepdims = 0>(t, a)", Rows(0)),
    *((op, X, f"y = {op}<axis = 2, keepdims = 0>(x)", Rows(0)) for op in ("ArgMax", "ArgMin")),
    ("ArgMax", X, "y = ArgMax(x)", NONE),
    ("LayerNormalization", X, "c = Constant<value = float[4] {1, 2, 3, 4}>() y = LayerNormalization(x, c)", Rows(0)),
    ("LayerNormalization", "float[3, 1] x", "c = Constant<value = float[3, 1] {1, 2, 3}>() "
     "y = LayerNormalization<axis = 0>(x, c)", NONE),
    ("LayerNormalization", X, "c = Constant<value = float[4] {1, 2, 3, 4}>() y = LayerNormalization<axis = 1>(x, c)",
     Rows(0)),
    ("LayerNormalization", X, "c = Constant<value = float[4] {1, 2, 3, 4}>() y = LayerNormalization<axis = 0>(x, c)",
     NONE),  # over all examples
    ("LayerNormalization", FLAT, "t = Transpose(x) c = Constant<value = float[1] {2}>() y = LayerNormalization(t, c)",
     NONE),  # the batch is the last axis
    ("MeanVarianceNormalization", PICTURE, "y = MeanVarianceNormalization<axes = [2, 3]>(x)", Rows(0)),
    ("MeanVarianceNormalization", PICTURE, "y = MeanVarianceNormalization(x)", NONE),
    ("OneHot", "int64[batch, 2] x", "d = Constant<value = int64 {3}>() v = Constant<value = float[2] {0, 1}>() "
     "y = OneHot(x, d, v)", Rows(0)),
    ("OneHot", "int64[batch, 2] x", "d = Constant<value = int64 {3}>() v = Constant<value = float[2] {0, 1}>() "
     "y = OneHot<axis = 0>(x, d, v)", Rows(1)),
    ("Resize", PICTURE, "s = Constant<value = float[4] {1, 1, 2, 2}>() y = Resize<mode = \"linear\">(x, , s)", Rows(0)),
    ("Resize", PICTURE, "s = Constant<value = float[4] {2, 1, 1, 1}>() y = Resize(x, , s)", NONE),
    ("GridSample", "float[batch, 3, 3, 2] x", "t = Transpose<perm = [0, 3, 1, 2]>(x) y = GridSample(t, x)", Rows(0)),
    ("LSTM", "float[batch, 3, 2] x", "t = Transpose<perm = [1, 0, 2]>(x) w = Constant<value = float[1, 4, 2] "
     "{1, 2, 3, 4, 5, 6, 7, 8}>() r = Constant<value = float[1, 4, 1] {1, 2, 3, 4}>() "
     "y = LSTM<hidden_size = 1>(t, w, r)", Rows(2)),
    ("GRU", "float[batch, 3, 2] x", "t = Transpose<perm = [1, 0, 2]>(x) w = Constant<value = float[1, 3, 2] "
     "{1, 2, 3, 4, 5, 6}>() r = Constant<value = float[1, 3, 1] {1, 2, 3}>() z, y = GRU<hidden_size = 1>(t, w, r)",
     Rows(1)),
    ("RNN", "float[batch, 3, 2] x", "w = Constant<value = float[1, 1, 2] {1, 2}>() r = Constant<value = float[1, 1, 1] "
     "{1}>() y = RNN<hidden_size = 1>(x, w, r)", NONE),  # the batch as time
    ("RNN", "float[batch, 3, 2] x", "t = Transpose<perm = [1, 0, 2]>(x) w = Constant<value = float[1, 1, 2] {1, 2}>() "
     "r = Constant<value = float[1, 1, 1] {1}>() y = RNN<hidden_size = 1>(t, w, r)", Rows(2)),
    ("Bernoulli", FLAT, "y = Bernoulli(x)", NONE),
    # What is drawn anew with every batch is not fixed, although no example enters.
    ("RandomNormal", FLAT, "r = RandomNormal<shape = [4]>() y = Add(x, r)", NONE),
    ("RandomUniform", FLAT, "r = RandomUniform<shape = [4]>() y = Add(x, r)", NONE),
    *((op, FLAT, f"c = Constant<value = float[4] {{0.1, 0.5, 0.5, 0.9}}>() r = {op}(c) y = Add(x, r)", NONE)
      for op in ("RandomNormalLike", "RandomUniformLike", "Bernoulli")),
    ("Multinomial", "int32[batch, 4] x", "c = Constant<value = float[1, 4] {1, 2, 3, 4}>() "
     "r = Multinomial<sample_size = 4>(c) y = Add(x, r)", NONE),
    ("Dropout", FLAT, "c = Constant<value = float[4] {1, 2, 3, 4}>() p = Constant<value = float {0.5}>() "
     "on = Constant<value = bool {1}>() r = Dropout(c, p, on) y = Add(x, r)", NONE),
    ("NonZero", FLAT, "y = NonZero(x)", NONE),
    ("DynamicQuantizeLinear", FLAT, "y, s, z = DynamicQuantizeLinear(x)", NONE),  # one scale for all examples
]  # fmt: skip


def test_no_rule_is_left_out() -> None:
    proven = {name for name, *_, rows in CASES if rows is not None}
    assert proven == set(arithmetic.RULES) | set(layout.RULES)


@pytest.mark.parametrize(("op", "field", "body", "expected"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
@pytest.mark.sampled(every=6)
def test_rows(op: str, field: str, body: str, expected: Rows | None) -> None:
    head = f'<ir_version: 10, opset_import: ["" : 21]> agraph ({field}) => (float y) {{'
    proto = onnx.parser.parse_model(f"{head} {body} }}")
    assert op in {node.op_type for node in proto.graph.node}
    del proto.graph.output[:]
    proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    model = ir.serde.deserialize_model(proto)
    x = model.graph.inputs[0]
    y = next(value for node in model.graph for value in node.outputs if value.name == "y")
    model.graph.outputs.append(y)
    if op == "GroupNormalization":
        y.shape, y.dtype = x.shape, x.dtype  # which ONNX does not infer, so that models declare it
    sizes = fold_sizes(Builder(model.graph), x, {x, *(v for node in model.graph for v in node.outputs)})
    found = batch_axes(model.graph, [x], sizes).rows.get(y)
    assert found == expected
    if expected is not None:
        _check_rows(model, x, y, expected)


def _check_rows(model: ir.Model, x: ir.Value, y: ir.Value, rows: Rows) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # ONNX Runtime has no kernel of CastLike as such, but its function body.
    proto = ir.to_proto(model)
    proto.graph.output[0].ClearField("type")
    proto.graph.output[0].type.tensor_type.elem_type = int(dtype_of(y))
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    dtype, rng = dtype_of(x).numpy(), np.random.default_rng(0)
    count = x.shape[0] if isinstance(x.shape[0], int) else 5
    shape = (count, *x.shape[1:])
    if dtype.kind == "f":
        data = rng.uniform(0.1, 2.0, shape).astype(dtype)
    else:
        data = rng.integers(0, 2 if dtype.kind == "b" else 3, shape).astype(dtype)

    def run(batch: np.ndarray) -> np.ndarray:
        (result,) = session.run(None, {x.name: batch})
        result = np.moveaxis(result, rows.axis, 0)
        return result.reshape(len(batch), rows.each, *result.shape[1:])

    whole, order = run(data), rng.permutation(count)
    np.testing.assert_allclose(run(data[order]), whole[order], rtol=1e-6)
    if not isinstance(x.shape[0], int):
        np.testing.assert_allclose(run(data[1:3]), whole[1:3], rtol=1e-6)
