"""The one table from operator to gradient rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from archipel.errors import AutodiffError, MissingRuleError
from archipel.graph.functions import KEPT, inlined_functions

if TYPE_CHECKING:
    from archipel.autodiff.context import RuleContext

Gradients = Sequence[ir.Value | None]
Rule = Callable[["RuleContext"], Gradients]

RULES: dict[tuple[str, str], Rule] = {}
"""(domain, operator) -> rule. Filled by `@rule`; the project's own are in `rules/`, one file per family, and are there
as soon as anything of `archipel.autodiff` is imported."""

# Where a missing rule belongs; what is not listed starts a family of its own.
_FAMILIES: dict[str, str] = {
    "elementwise": "Abs Add Sub Mul Div Neg Pow Sqrt Exp Log Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh "
    "Erf Reciprocal Round Floor Ceil Mod Sign Sum Mean",
    "activation": "Relu LeakyRelu Sigmoid Tanh Gelu HardSwish HardSigmoid Elu Selu Celu PRelu Softplus Softsign "
    "Mish Swish ThresholdedRelu",
    "select": "Where Clip Min Max Trilu",
    "softmax": "Softmax LogSoftmax SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss",
    "matmul": "MatMul Gemm",
    "einsum": "Einsum",
    "conv": "Conv ConvTranspose Col2Im",
    "pooling": "MaxPool AveragePool GlobalAveragePool GlobalMaxPool LpPool",
    "shape": "Identity Cast CastLike Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile DepthToSpace SpaceToDepth",
    "reduce": "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum "
    "ReduceLogSumExp",
    "cumulative": "CumSum",
    "join": "Concat Split Slice Pad",
    "gather": "Gather GatherElements GatherND ScatterElements ScatterND TopK",
    "normalization": "BatchNormalization LayerNormalization RMSNormalization InstanceNormalization GroupNormalization "
    "LRN LpNormalization MeanVarianceNormalization",
    "recurrent": "LSTM GRU RNN",
    "control_flow": "If Loop Scan",
    "quantization": "QuantizeLinear DequantizeLinear",
    "random": "Dropout",
    "image": "Resize GridSample Upsample",
    "attention": "Attention",
}


def rule(domain: str, *op_types: str) -> Callable[[Rule], Rule]:
    """Register the gradient rule of operators; `domain` is "" for standard ONNX.

    The rule is given a `RuleContext` and returns one gradient for each input of the node, in order: a value of the
    input's shape and type, or None where there is none. Inputs at the end may be left out.

    Models loaded from then on keep their local functions of this name until they are differentiated, so that the rule
    is used; a function without a rule is differentiated through its body.
    """
    if not op_types:
        raise AutodiffError("rule: name the operators, as in @rule('', 'Relu')")

    def register(function: Rule) -> Rule:
        for op_type in op_types:
            if (domain, op_type) in RULES:
                raise AutodiffError(
                    f"rule: {domain or 'ai.onnx'}::{op_type} already has one, in {where(RULES[domain, op_type])}"
                )
            RULES[domain, op_type] = function
            if domain != "":
                KEPT.add((domain, op_type))
        return function

    return register


def find(node: ir.Node) -> Rule:
    """The rule of a node's operator. Raises MissingRuleError that names the file to add it to."""
    found = RULES.get((node.domain, node.op_type))
    if found is not None:
        return found
    if node.domain != "":
        raise MissingRuleError(
            f"no gradient rule for {node.domain}::{node.op_type} (node {node.name!r}); "
            f"register one with @autodiff.rule({node.domain!r}, {node.op_type!r})"
        )
    raise MissingRuleError(
        f"no gradient rule for {node.op_type} (node {node.name!r}); add one to "
        f"archipel/autodiff/rules/{_family(node.op_type)}.py, with cases in tests/autodiff/gradient_cases/"
    )


def require_kept(graph: ir.Graph) -> None:
    """Raise AutodiffError if the import inlined a function that has got a rule since: the rule would not be used."""
    late = sorted(inlined_functions(graph) & RULES.keys())
    if late:
        domain, op_type = late[0]
        raise AutodiffError(
            f"the rule for {domain}::{op_type} was registered after the model was loaded, when its function had been "
            "inlined already; load the model again from its source"
        )


def where(function: Rule) -> str:
    """The file a rule is written in, from the package on."""
    path = inspect.getsourcefile(function) or "an unknown file"
    return path[path.rfind("archipel/autodiff") :] if "archipel/autodiff" in path else path


def _family(op_type: str) -> str:
    return next((family for family, ops in _FAMILIES.items() if op_type in ops.split()), op_type.lower())
