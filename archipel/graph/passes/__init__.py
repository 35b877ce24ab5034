"""Passes over a graph: objects of onnx_ir's pass classes, called with the model that they change."""

from archipel.graph.passes.constant_folding import FoldConstants as FoldConstants
from archipel.graph.passes.dead_code import remove_dead_code as remove_dead_code
from archipel.graph.passes.identities import remove_identities as remove_identities
from archipel.graph.passes.optimize import optimize as optimize
from archipel.graph.passes.reshape_targets import fix_reshape_targets as fix_reshape_targets
from archipel.graph.passes.simplify import simplify as simplify
from archipel.graph.passes.subexpressions import share_subexpressions as share_subexpressions
