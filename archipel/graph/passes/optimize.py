"""`optimize`: the passes for a graph after differentiation."""

from __future__ import annotations

from archipel.graph.passes.accumulate import accumulate_in_gemm
from archipel.graph.passes.base import InlinedPipeline
from archipel.graph.passes.concatenation import concatenate_pads
from archipel.graph.passes.constants import plain_constants
from archipel.graph.passes.dead_code import remove_dead_code
from archipel.graph.passes.identities import remove_identities
from archipel.graph.passes.products import transpose_products
from archipel.graph.passes.rewriting import ApplyRules, cancelling_rules
from archipel.graph.passes.scalars import lift_scalars
from archipel.graph.passes.subexpressions import share_subexpressions
from archipel.graph.passes.zeros import remove_zeros

optimize = InlinedPipeline(
    remove_dead_code,
    ApplyRules(cancelling_rules),
    remove_identities,
    share_subexpressions,
    remove_zeros,
    remove_dead_code,
    concatenate_pads,
    remove_dead_code,
    transpose_products,
    remove_dead_code,
    accumulate_in_gemm,
    remove_dead_code,
    lift_scalars,
    remove_dead_code,
    plain_constants,
)
"""`optimize(model)`: drop what differentiation leaves behind, and use fused forms that ONNX Runtime runs faster.

Dead code, casts and transposes that cancel, products with one, common subexpressions, additions of zero, transposes of
products, sums that are a Gemm or a Concat, scalars beside tensors of many small rows; Constants get the attribute that
every engine reads. They are not folded: those that rules make (such as tiled identity kernels) would become large.
Changes the model, whose functions must have been inlined.
"""
