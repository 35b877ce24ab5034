"""Rules for operators that compute: elementwise, products, convolutions, reductions, normalizations, recurrence.

A rule says which rows the outputs have, given those of the inputs; all other inputs are fixed or sizes of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from archipel.converter.frozen.rows import (
    NOTHING,
    Node,
    Result,
    Rows,
    Rule,
    aligned_rows,
    axes_operand,
    positive_axis,
    rule_table,
    untouched_rows,
)


def _broadcast(n: Node) -> Result:
    """Elementwise with broadcasting: all operands have their rows on one axis, or are the same for every row."""
    return n.one(aligned_rows(n, range(len(n.inputs)), len(n.out())))


def _first(n: Node) -> Result:
    """Operators that treat the entries of axis 0 one by one, such as convolution, with all other inputs fixed."""
    rows = n.rows(0)
    return n.one(rows) if rows is not None and rows.axis == 0 and n.rest_fixed() else NOTHING


def _batch_norm(n: Node) -> Result:
    # In training mode it normalizes with the statistics of the batch, which mix examples.
    return NOTHING if n.integer("training_mode", 0) else _first(n)


def _dropout(n: Node) -> Result:
    training = n.content(2)  # without its third input, training_mode, it is the identity
    off = not n.given(2) or (training is not None and not training.any())
    return n.one(n.rows(0)) if off and n.fixed(1) else NOTHING


def _like(n: Node) -> Result:
    return n.one(n.rows(0))  # of the second input only the type counts


def _quantize(n: Node) -> Result:
    rows = n.rows(0)
    if rows is None or not n.rest_fixed() or n.integer("block_size", 0):
        return NOTHING
    # A single scale is the same for every row; several must lie along another axis. A free size may be more than 1.
    single = math.prod(d if isinstance(d, int) else 2 for d in n.shape(1)) == 1
    return n.one(rows) if single or positive_axis(n.integer("axis", 1), len(n.shape(0))) != rows.axis else NOTHING


def _gemm(n: Node) -> Result:
    rows = n.rows(0)
    # The rows of A (its columns where it is transposed) are those of the result; over its other axis the product sums.
    if rows is None or rows.axis != int(bool(n.integer("transA", 0))) or not n.fixed(1):
        return NOTHING
    place = Rows(0, rows.each)
    # A fixed bias must not have an entry for each row; one with rows must have them on the same axis.
    if n.given(2) and n.fixed(2):
        return n.one(place) if len(n.shape(2)) < 2 or n.shape(2)[0] == 1 else NOTHING
    return n.one(place) if not n.given(2) or aligned_rows(n, [2], 2) == place else NOTHING


def _matmul(n: Node) -> Result:
    a, b = n.rows(0), n.rows(1)
    ranks = [len(n.shape(0)), len(n.shape(1))]
    # A vector on the left is summed over as a whole, one on the right over the last axis of the left factor.
    if not n.rest_fixed(2) or 1 in ranks[:1]:
        return NOTHING
    if ranks[1] == 1:
        return n.one(a) if a is not None and b is None and a.axis < ranks[0] - 1 else NOTHING
    rank = max(ranks)
    # Each row of the left matrix, and each column of the right one, makes its own row or column of the product.
    for rows, other, index, free in ((a, b, 0, rank - 2), (b, a, 1, rank - 1)):
        if rows is not None and other is None and rank - ranks[index] + rows.axis == free:
            return n.one(Rows(free, rows.each))
    # Axes before the last two stack matrices, and broadcast like those of elementwise operators.
    place = aligned_rows(n, [0, 1], rank)
    return n.one(place) if place is not None and place.axis < rank - 2 else NOTHING


def _einsum(n: Node) -> Result:
    equation = n.node.attributes.get_string("equation", "").replace(" ", "")
    terms, _, result = equation.partition("->")
    # An ellipsis has no letter for the batch, and without an arrow or a result there is no axis for it.
    if "." in equation or not result:
        return NOTHING
    letters, each = set(), set()
    for i, term in enumerate(terms.split(",")):
        rows = n.rows(i)
        if rows is not None:
            letters.add(term[rows.axis])
            each.add(rows.each)
    if len(letters) != 1 or len(each) != 1:
        return NOTHING
    (letter,) = letters
    # The batch's letter is once in each operand with rows, in no other, and in the result: it is never summed over.
    for i, term in enumerate(terms.split(",")):
        if term.count(letter) != (n.rows(i) is not None):
            return NOTHING
    return n.one(Rows(result.index(letter), each.pop())) if result.count(letter) == 1 else NOTHING


def _softmax(n: Node) -> Result:
    return n.one(untouched_rows(n, n.integer("axis", -1)))


def _top_k(n: Node) -> Result:
    return n.all(untouched_rows(n, n.integer("axis", -1)))


def _cumulate(n: Node) -> Result:
    axis = n.content(1)
    return NOTHING if axis is None else n.one(untouched_rows(n, int(axis.reshape(()))))


def _reduce(n: Node) -> Result:
    rank = len(n.shape(0))
    axes = axes_operand(n, 1, rank)
    # Without axes it reduces all of them, the batch's too, or none with noop_with_empty_axes.
    if not n.given(1) or axes == []:
        axes = [] if n.integer("noop_with_empty_axes", 0) else None
    return _reduced(n, axes)


def _arg(n: Node) -> Result:
    return _reduced(n, [positive_axis(n.integer("axis", 0), len(n.shape(0)))])


def _reduced(n: Node, axes: Sequence[int] | None) -> Result:
    rows = n.rows(0)
    if rows is None or axes is None or rows.axis in axes:
        return NOTHING
    return n.one(rows if n.integer("keepdims", 1) else Rows(rows.axis - sum(a < rows.axis for a in axes), rows.each))


def _layer_norm(n: Node) -> Result:
    rows, rank = n.rows(0), len(n.shape(0))
    # It normalizes over all axes from `axis` on, so the rows must be before that.
    start = positive_axis(n.integer("axis", -1), rank)
    inside = rows is not None and rows.axis < start and aligned_rows(n, range(len(n.inputs)), rank) == rows
    return n.all(rows) if inside else NOTHING


def _mean_variance(n: Node) -> Result:
    rows, axes = n.rows(0), n.node.attributes.get_ints("axes") or (0, 2, 3)
    return (
        n.one(rows)
        if rows is not None and rows.axis not in [positive_axis(a, len(n.shape(0))) for a in axes]
        else NOTHING
    )


def _one_hot(n: Node) -> Result:
    rows = n.rows(0)
    if rows is None or not n.rest_fixed():
        return NOTHING
    # The new axis of classes moves the axes from its place on back by one.
    axis = positive_axis(n.integer("axis", -1), len(n.out()))
    return n.one(rows if rows.axis < axis else Rows(rows.axis + 1, rows.each))


def _resize(n: Node) -> Result:
    rows, axes = n.rows(0), n.node.attributes.get_ints("axes")
    mode = n.node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    policy = n.node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    # Cropping, and keeping an aspect ratio, could change the batch's axis as well.
    if rows is None or rows.each != 1 or mode == "tf_crop_and_resize" or policy != "stretch" or not n.fixed(1, 2):
        return NOTHING
    if axes:
        outside = rows.axis not in [positive_axis(a, len(n.shape(0))) for a in axes]
        return n.one(rows) if outside and n.fixed(3) else NOTHING
    # Without `axes` every axis is resized: the batch's must have the scale 1, or the batch size as its target.
    scales, sizes = n.content(2), n.target(3)
    kept = scales is not None and scales.size > rows.axis and scales[rows.axis] == 1
    sized = sizes is not None and len(sizes.elements) > rows.axis and sizes.elements[rows.axis] is None
    return n.one(rows) if kept or sized else NOTHING


def _grid_sample(n: Node) -> Result:
    return n.one(Rows(0)) if n.rows(0) == n.rows(1) == (0, 1) else NOTHING


def _recurrent(n: Node) -> Result:
    """LSTM, GRU, RNN as laid out by default: sequences [time, batch, size], states [directions, batch, size]."""
    # Inputs: X, W, R, B, the lengths of the sequences, the first states (h and for LSTM c), and LSTM's peepholes P.
    states = [i for i in (5, 6) if n.given(i)]
    weights = [i for i in (1, 2, 3, 7) if n.given(i)]
    lengths = not n.given(4) or n.rows(4) == (0, 1)
    proven = n.rows(0) == (1, 1) and n.fixed(*weights) and lengths and all(n.rows(i) == (1, 1) for i in states)
    # Y is [time, directions, batch, size]; the last states come without the time.
    return [Rows(2), Rows(1), Rows(1)] if proven and not n.integer("layout", 0) else NOTHING


RULES: dict[str, Rule] = rule_table(
    {
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil "
        "Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity "
        "IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu "
        "Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Where "
        "Xor": _broadcast,
        "AveragePool Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization "
        "InstanceNormalization LRN LpPool MaxPool SpaceToDepth STFT": _first,
        "BatchNormalization": _batch_norm,
        "Dropout": _dropout,
        "CastLike": _like,
        "QuantizeLinear DequantizeLinear": _quantize,
        "Gemm": _gemm,
        "MatMul": _matmul,
        "Einsum": _einsum,
        "Softmax LogSoftmax Hardmax LpNormalization": _softmax,
        "TopK": _top_k,
        "CumSum": _cumulate,
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare": _reduce,
        "ArgMax ArgMin": _arg,
        "LayerNormalization": _layer_norm,
        "MeanVarianceNormalization": _mean_variance,
        "OneHot": _one_hot,
        "Resize": _resize,
        "GridSample": _grid_sample,
        "LSTM GRU RNN": _recurrent,
    }
)
