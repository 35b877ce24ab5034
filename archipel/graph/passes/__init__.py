"""Passes over a graph. Each changes the model it is given."""

from archipel.graph.passes.cleanup import remove_dead_code as remove_dead_code
from archipel.graph.passes.cleanup import share_subexpressions as share_subexpressions
from archipel.graph.passes.optimize import optimize as optimize
from archipel.graph.passes.simplify import fix_reshape_targets as fix_reshape_targets
from archipel.graph.passes.simplify import fold_constants as fold_constants
from archipel.graph.passes.simplify import simplify as simplify
