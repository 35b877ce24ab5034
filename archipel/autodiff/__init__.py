"""Source-to-source automatic differentiation of ONNX graphs, in standard operators only."""

from archipel.graph import requirement as requirement  # isort: skip  (first: it names the missing extra)
from archipel.autodiff import rules as rules  # registers the gradient rules
from archipel.autodiff.api import gradient as gradient
from archipel.autodiff.api import hessian_vector as hessian_vector
from archipel.autodiff.api import jvp as jvp
from archipel.autodiff.api import vjp as vjp
from archipel.autodiff.batching.vmap import vmap as vmap
from archipel.autodiff.checkpoint import checkpoint as checkpoint
from archipel.autodiff.context import ForwardContext as ForwardContext
from archipel.autodiff.context import RuleContext as RuleContext
from archipel.autodiff.linear import linearize as linearize
from archipel.autodiff.markers import clip_gradient as clip_gradient
from archipel.autodiff.markers import stop_gradient as stop_gradient
from archipel.autodiff.markers import straight_through as straight_through
from archipel.autodiff.registry import FORWARD as FORWARD
from archipel.autodiff.registry import RULES as RULES
from archipel.autodiff.registry import forward_rule as forward_rule
from archipel.autodiff.registry import keep_function as keep_function
from archipel.autodiff.registry import rule as rule
from archipel.autodiff.reverse import differentiate as differentiate

__all__ = [
    "FORWARD", "RULES", "ForwardContext", "RuleContext", "checkpoint", "clip_gradient", "differentiate", "forward_rule",
    "gradient", "hessian_vector", "jvp", "keep_function", "linearize", "rule", "stop_gradient", "straight_through",
    "vjp", "vmap",
]  # fmt: skip
