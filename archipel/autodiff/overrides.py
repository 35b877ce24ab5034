"""Rules for one call: in place of those of single nodes or of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import onnx_ir as ir

from archipel.autodiff.registry import OWN_RULE, RULES, Rule
from archipel.errors import AutodiffError
from archipel.graph.functions import inline_functions, inlined_functions
from archipel.graph.model import Model

Overrides = Mapping[str | tuple[str, str], Rule]
"""Name of a node, or (domain, operator) -> rule."""


def opened(model: Model, rules: Overrides | None) -> Model:
    """A copy of the model to differentiate, whose nodes have the rules that are to count for this call.

    Functions without a rule are inlined. Raises AutodiffError for a key that fits no node.
    """
    result, rules = model.copy(), dict(rules or {})
    inline_functions(result.ir, keep={*RULES, *(key for key in rules if isinstance(key, tuple))})
    graph = result.ir.graph
    # Those for a node's name come last, and so count more than those for its operator.
    for key, rule in sorted(rules.items(), key=lambda item: isinstance(item[0], str)):
        nodes = [node for node in graph.all_nodes() if key in (node.name, (node.domain, node.op_type))]
        if not nodes:
            _refuse(graph, key)
        for node in nodes:
            node.meta[OWN_RULE] = rule
    return result


def forget_rules(graph: ir.Graph) -> None:
    """Take the rules for one call off the nodes."""
    for node in graph.all_nodes():
        node.meta.pop(OWN_RULE, None)


def _refuse(graph: ir.Graph, key: object) -> None:
    if isinstance(key, tuple) and key in inlined_functions(graph):
        domain, op_type = key
        raise AutodiffError(
            f"rules: the function {domain}::{op_type} was inlined when the model was loaded; call "
            f"autodiff.keep_function({domain!r}, {op_type!r}) before you load it"
        )
    if isinstance(key, tuple):
        raise AutodiffError(
            f"rules: the model has no node of {key!r}; give (domain, operator), domain '' for standard ONNX"
        )
    names = ", ".join(str(node.name) for node in islice(graph.all_nodes(), 20))
    raise AutodiffError(f"rules: the model has no node named {key!r}; its first ones are: {names}")
