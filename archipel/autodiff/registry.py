"""The one table from operator to gradient rule, and the few operators that have a rule of forward mode beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from archipel.errors import AutodiffError, MissingRuleError
from archipel.graph.functions import KEPT, inlined_functions

if TYPE_CHECKING:
    from archipel.autodiff.context import ForwardContext, RuleContext

Gradients = Sequence[ir.Value | None]
Rule = Callable[["RuleContext"], Gradients]

Tangents = Sequence[ir.Value | None]
ForwardRule = Callable[["ForwardContext"], Tangents]

RULES: dict[tuple[str, str], Rule] = {}
"""(domain, operator) -> rule. `@rule` fills it; importing `archipel.autodiff` registers those in `rules/`."""

FORWARD: dict[tuple[str, str], ForwardRule] = {}
"""(domain, operator) -> rule of forward mode, which takes the place of the transposed rule in RULES."""

OWN_RULE = "archipel.rule"
"""Key in the `meta` of a node and its copies: the rule for this node, while one derivative is taken."""

_SEQUENCES = {
    *("SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "SequenceEmpty", "SequenceMap"),
    *("ConcatFromSequence", "SplitToSequence"),
}


def rule(domain: str, *op_types: str) -> Callable[[Rule], Rule]:
    """Register the gradient rule of some operators, as a decorator.

    Arguments:
        domain: the operators' domain; "" for standard ONNX.
        op_types: their names. A name of a model-local function gives the function a rule of its own, in place of the
            derivative of its body; models loaded before that have the body inlined already.

    The rule takes a `RuleContext` and returns one gradient for each input of the node, in order: a value of the input's
    shape and type, or None for an input without gradient. It may leave out inputs at the end. A rule for a node with
    bodies goes on with one gradient for each of `ctx.captured`, the values that the bodies read from outside.

    Returns the decorator, which returns the rule unchanged.

    Raises AutodiffError without names, and for an operator that has a rule already.

    Example:
        @autodiff.rule("example.functions", "Binarize")
        def straight_through(ctx):
            return [ctx.cotangent]
    """
    if not op_types:
        raise AutodiffError("rule: name the operators, as in @rule('', 'Relu')")

    def register(function: Rule) -> Rule:
        for op_type in op_types:
            if (domain, op_type) in RULES:
                raise AutodiffError(
                    f"rule: {domain or 'ai.onnx'}::{op_type} already has one, in {source_file(RULES[domain, op_type])}"
                )
            RULES[domain, op_type] = function
            if domain != "":
                # The import inlines every function but those listed here: a rule is found by the name of its node.
                KEPT.add((domain, op_type))
        return function

    return register


def forward_rule(domain: str, *op_types: str) -> Callable[[ForwardRule], ForwardRule]:
    """Register a rule of forward mode for operators that have a gradient rule, as a decorator.

    Forward mode needs none: it transposes the gradient rule. A rule of its own is for operators whose gradient's
    gradient costs more than one writes by hand, and for those whose gradient is not linear in its cotangents.

    Arguments:
        domain: the operators' domain; "" for standard ONNX.
        op_types: their names.

    The rule takes a `ForwardContext` and returns one tangent for each output of the node, in order: a value of the
    output's shape and type, or None for an output that does not move. It may leave out outputs at the end.

    Returns the decorator, which returns the rule unchanged.

    Raises AutodiffError for an operator without a gradient rule, and for one that has a rule of forward mode already.

    Example:
        @autodiff.rule("example.functions", "Binarize")
        def backward(ctx):
            return [ctx.cotangent]

        @autodiff.forward_rule("example.functions", "Binarize")
        def forward(ctx):
            return [ctx.tangent(0)]
    """

    def register(function: ForwardRule) -> ForwardRule:
        for op_type in op_types:
            key = (domain, op_type)
            if key not in RULES:
                raise AutodiffError(
                    f"forward_rule: {domain or 'ai.onnx'}::{op_type} has no gradient rule; add that first"
                )
            if key in FORWARD:
                raise AutodiffError(
                    f"forward_rule: {domain or 'ai.onnx'}::{op_type} already has one, in {source_file(FORWARD[key])}"
                )
            FORWARD[key] = function
        return function

    return register


def keep_function(domain: str, *names: str) -> None:
    """Have models that are loaded from now on keep calls of these model-local functions, as `rule` does.

    For `rules=` of `gradient` and its like, which replace the rule of a function for one call. A derivative without
    such a rule inlines the functions.

    Arguments:
        domain: the functions' domain.
        names: their names.

    Example:
        autodiff.keep_function("example.functions", "Binarize")
    """
    KEPT.update((domain, name) for name in names)


def find_rule(node: ir.Node) -> Rule:
    """The rule of a node, or of its operator. Raises MissingRuleError that names the file to add it to."""
    own: Rule | None = node.meta.get(OWN_RULE)
    if own is not None:
        return own
    registered = RULES.get((node.domain, node.op_type))
    if registered is not None:
        return registered
    if node.domain != "":
        raise MissingRuleError(
            f"no gradient rule for {node.domain}::{node.op_type} (node {node.name!r}); "
            f"register one with @autodiff.rule({node.domain!r}, {node.op_type!r})"
        )
    if node.op_type in _SEQUENCES:
        raise MissingRuleError(
            f"no gradient passes through {node.op_type} (node {node.name!r}): what a sequence holds is known only at "
            "run time, and its gradient would have to be a sequence, too; export the model with Concat, Split and "
            "Gather in its place"
        )
    raise MissingRuleError(
        f"no gradient rule for {node.op_type} (node {node.name!r}); train only what comes after it, export "
        f"the model without it, or register a rule with @autodiff.rule('', {node.op_type!r})"
    )


def require_kept(graph: ir.Graph) -> None:
    """Raise AutodiffError if a rule was registered for a function after the import had inlined it.

    Without the function's node nothing would use the rule, and the gradient would silently be that of the body.
    """
    too_late = sorted(inlined_functions(graph) & RULES.keys())
    if too_late:
        domain, op_type = too_late[0]
        raise AutodiffError(
            f"the rule for {domain}::{op_type} was registered after the model was loaded, when its function had been "
            "inlined already; load the model again from its source"
        )


def source_file(function: Rule | ForwardRule) -> str:
    """The path of the file that defines a rule, from `archipel/` on; of a user's rule the whole path."""
    path = inspect.getsourcefile(function) or "an unknown file"
    return path[path.rfind("archipel/autodiff") :] if "archipel/autodiff" in path else path
