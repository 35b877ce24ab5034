"""The rule of each operator: how channels go through it, and what changes in the node when channels go.

An operator that is not here is a barrier: all channels that reach it stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import onnx_ir as ir

from archipel.compression.prune.cuts import Cuts
from archipel.compression.prune.links import Links
from archipel.compression.prune.rules import (
    elementwise,
    layers,
    layout,
    normalization,
    recurrent,
    reduction,
    reshape,
    windows,
)


class Rule(NamedTuple):
    """`link` ties the axes of a node's values (and may raise Opaque); `cut` changes the node when indices go."""

    link: Callable[[ir.Node, Links], None]
    cut: Callable[[ir.Node, Cuts], None] | None = None


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _target(node: ir.Node, cuts: Cuts) -> None:
    cuts.target(node)


RULES: dict[str, Rule] = {
    "Conv": Rule(layers.conv, layers.cut_groups),
    "ConvTranspose": Rule(layers.conv_transpose, layers.cut_groups),
    "Gemm": Rule(layers.gemm),
    "MatMul": Rule(layers.matmul),
    "Einsum": Rule(layers.einsum),
    **_rules(Rule(recurrent.recurrent, recurrent.cut_hidden), "LSTM GRU RNN"),
    "BatchNormalization": Rule(normalization.batch),
    "InstanceNormalization": Rule(normalization.instance),
    "GroupNormalization": Rule(normalization.group, normalization.cut_group),
    "LayerNormalization": Rule(normalization.layer),
    "LRN": Rule(normalization.local_response),
    **_rules(Rule(normalization.along_axis), "Softmax LogSoftmax Hardmax LpNormalization"),
    **_rules(
        Rule(elementwise.keeps_zero),
        "Identity Cast Dropout Relu LeakyRelu Elu Selu Celu Tanh Gelu HardSwish Mish Softsign ThresholdedRelu Shrink "
        "Abs Neg Sqrt Erf Sin Tan Sinh Asin Atan Asinh Atanh Floor Ceil Round Sign IsNaN IsInf",
    ),
    **_rules(
        Rule(elementwise.moves_zero),
        "Sigmoid HardSigmoid Exp Log Softplus Cos Cosh Acos Acosh Reciprocal Not BitwiseNot",
    ),
    "Clip": Rule(elementwise.clip),
    **_rules(Rule(elementwise.all_zero), "Add Sub Sum Mean Max Min Or Xor"),
    **_rules(Rule(elementwise.any_zero), "Mul And"),
    "Div": Rule(elementwise.quotient),
    "Pow": Rule(elementwise.power),
    "PRelu": Rule(elementwise.parametric_relu),
    "Where": Rule(elementwise.choice),
    **_rules(Rule(elementwise.comparison), "Equal Greater GreaterOrEqual Less LessOrEqual Mod"),
    "Expand": Rule(elementwise.expand, _target),
    **_rules(
        Rule(windows.pool), "MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool"
    ),
    "Resize": Rule(windows.resize, _target),
    "Pad": Rule(windows.pad),
    **_rules(Rule(reduction.total), "ReduceSum ReduceL1 ReduceL2 ReduceSumSquare"),
    **_rules(Rule(reduction.statistic), "ReduceMean ReduceMax ReduceMin ReduceProd"),
    **_rules(Rule(reduction.nonzero_statistic), "ReduceLogSum ReduceLogSumExp"),
    **_rules(Rule(reduction.arg), "ArgMax ArgMin"),
    "CumSum": Rule(reduction.cumulative),
    "Trilu": Rule(reduction.triangle),
    "Transpose": Rule(layout.transpose),
    "Squeeze": Rule(layout.squeeze),
    "Unsqueeze": Rule(layout.unsqueeze),
    "Concat": Rule(layout.concat),
    "Split": Rule(layout.split, layout.cut_split),
    "Slice": Rule(layout.slice_, layout.cut_slice),
    "Gather": Rule(layout.gather, layout.cut_gather),
    "Tile": Rule(layout.tile),
    "ConstantOfShape": Rule(layout.filled, _target),
    "Reshape": Rule(reshape.reshape, _target),
    "Flatten": Rule(reshape.reshape),
}  # fmt: skip
