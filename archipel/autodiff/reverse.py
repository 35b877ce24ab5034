"""Reverse mode: walk the graph backwards, apply each node's rule, add up the contributions to each cotangent.

Griewank and Walther, Evaluating Derivatives (2008), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from archipel.autodiff.activity import active_values, find_obstacle, influencing_values, passes_derivative
from archipel.autodiff.context import RuleContext
from archipel.autodiff.recompute import Twins
from archipel.autodiff.registry import Rule, find_rule, require_kept, source_file
from archipel.errors import AutodiffError, NotDifferentiableError
from archipel.graph.build import Builder
from archipel.graph.shapes import complete_shape, dims, is_float, may_be_equal
from archipel.graph.walk import bodies, captured_values, descendants


def differentiate(
    op: Builder,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
    *,
    flat_steps: bool = False,
    own: Mapping[ir.Node, Rule] | None = None,
    again: bool = True,
) -> list[ir.Value]:
    """Emit the gradient of sum over targets of <target, seed> with respect to each of `wrt`.

    Arguments:
        op: builder of the graph; it appends the nodes of the gradient to it.
        seeds: target -> its cotangent, of the target's shape and type.
        wrt: floating-point values of the graph.
        flat_steps: give zeros, and no error, where a target depends on a value only through nodes that pass no
            derivative, such as comparisons: in a gradient these are the masks of kinks.
        own: rules for single nodes of the graph, in place of `find_rule`.
        again: compute once more what `checkpoint` has marked; False: keep it as everything else.

    Returns one gradient for each of `wrt`, of its shape and type; zeros where no target depends on it.

    Raises MissingRuleError for an operator without a rule between `wrt` and a target, NotDifferentiableError if a
    target depends on a value, but not through floating-point values, AutodiffError for a rule that breaks its contract.

    Example:
        op = Builder(model.ir.graph)
        loss, weight = model.ir.graph.outputs[1], model.ir.graph.initializers["fc.weight"]
        [gradient] = autodiff.differentiate(op, {loss: op.Constant(value_float=1.0)}, [weight])
    """
    require_kept(op.graph)
    nodes = list(op.graph)
    found, relevant = _sweep(op, nodes, seeds, wrt, own or {}, again)
    return [
        _without_path(op, nodes, value, set() if flat_steps else relevant) if gradient is None else gradient
        for value, gradient in zip(wrt, found)
    ]


def pull_back(op: Builder, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]) -> list[ir.Value | None]:
    """As `differentiate`, but None for a value that no derivative arrives at, whatever the reason.

    For the bodies of loops and branches: whether such a gradient exists shows outside.
    """
    return _sweep(op, list(op.graph), seeds, wrt, {}, again=False)[0]


def _sweep(
    op: Builder,
    nodes: list[ir.Node],
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
    own: Mapping[ir.Node, Rule],
    again: bool,
) -> tuple[list[ir.Value | None], set[ir.Value]]:
    """The gradients, as far as there are any, and the values that the targets depend on."""
    # Only values between `wrt` and a target get a cotangent; rules of other nodes are not needed and may be missing.
    # `relevant` has integers too: it tells a gradient that is zero from one that does not exist.
    relevant = influencing_values(nodes, seeds)
    carriers = active_values(nodes, wrt) & relevant
    sums = _Sums(op)
    for target, seed in seeds.items():
        if target in carriers:
            sums.add(target, seed)
    twins = Twins(op, nodes if again else [])
    # Backwards in topological order: every reader of a node's outputs has added its part before the node comes.
    for node in reversed(nodes):
        cotangents = tuple(sums.total(value) for value in node.outputs)
        if all(cotangent is None for cotangent in cotangents):
            continue
        read = (*node.inputs, *_captured(node))
        wanted = tuple(value is not None and value in carriers and passes_derivative(node, value) for value in read)
        if not any(value in carriers for value in read):
            continue
        twin = twins.of(node, [*(each for each in cotangents if each is not None), *sums.open()])
        rule = own.get(node) or find_rule(node)
        with op.scope(f"{node.name}.vjp"):
            gradients = rule(RuleContext(op, twin, cotangents, wanted, _captured(twin)))
            _check(node, read, rule, gradients)
            for value, gradient, want in zip(read, gradients, wanted):
                if value is not None and gradient is not None and want:
                    complete_shape(gradient, value)
                    sums.add(value, gradient)
    twins.finish()
    return [sums.total(value) for value in wrt], relevant


def _captured(node: ir.Node) -> tuple[ir.Value, ...]:
    return tuple(dict.fromkeys(value for body in bodies(node) for value in captured_values(body)))


class _Sums:
    """Contributions to each value's cotangent; `total` adds them up when all are there."""

    def __init__(self, op: Builder) -> None:
        self._op = op
        self._parts: dict[ir.Value, list[ir.Value]] = {}
        self._asked: set[ir.Value] = set()

    def add(self, value: ir.Value, part: ir.Value) -> None:
        self._parts.setdefault(value, []).append(part)
        self._asked.discard(value)

    def open(self) -> list[ir.Value]:
        """The contributions to cotangents that nobody has asked for so far, such as those of weights."""
        return [part for value, parts in self._parts.items() if value not in self._asked for part in parts]

    def total(self, value: ir.Value) -> ir.Value | None:
        self._asked.add(value)
        parts = self._parts.get(value)
        if not parts:
            return None
        # The sum takes its parts' place: a second call returns it and emits nothing.
        while len(parts) > 1:
            parts[:2] = [self._op.Add(parts[0], parts[1])]
        return parts[0]


def _without_path(op: Builder, nodes: list[ir.Node], value: ir.Value, relevant: set[ir.Value]) -> ir.Value:
    """The gradient of a value that no derivative arrives at: zeros, or an error if a target depends on it."""
    if value in relevant and not _is_of_a_gradient(nodes, value, relevant):
        node = find_obstacle(nodes, value, relevant)
        through = f"{node.op_type} {node.name!r}" if node is not None else "an input that has no derivative"
        raise NotDifferentiableError(
            f"the gradient with respect to {value.name!r} does not exist: the target depends on it only through "
            f"{through}, which passes no derivative on; leave {value.name!r} out of wrt"
        )
    return op.full_like(value, 0.0)


def _is_of_a_gradient(nodes: list[ir.Node], value: ir.Value, relevant: set[ir.Value]) -> bool:
    """Whether a target depends on the value through what a rule emitted: masks of kinks and places of extrema, which
    are constant almost everywhere, and not what somebody wrote into a model."""
    reached = descendants(nodes, [value]) & relevant
    return any(".vjp/" in str(node.name) for node in nodes if not reached.isdisjoint(node.outputs))


def _check(node: ir.Node, read: Sequence[ir.Value | None], rule: Rule, gradients: Sequence[ir.Value | None]) -> None:
    # A wrong rule is named here; otherwise a later node would fail that has nothing to do with it.
    title = f"gradient rule for {node.op_type} ({source_file(rule)}), node {node.name!r}"
    if any(gradient is not None for gradient in gradients[len(read) :]):
        raise AutodiffError(f"{title}: {len(gradients)} gradients for {len(read)} inputs")
    for index, (value, gradient) in enumerate(zip(read, gradients)):
        if gradient is None:
            continue
        if value is None or not passes_derivative(node, value):
            raise AutodiffError(f"{title}: a gradient for input {index}, which takes none")
        # The gradient of a quantized integer has the type of the real number that the integer stands for: a
        # DequantizeLinear reads it, whose output has that type.
        if gradient.dtype != (value.dtype if is_float(value) else node.outputs[0].dtype):
            raise AutodiffError(f"{title}: gradient of input {index} is {gradient.dtype}, the input {value.dtype}")
        have, want = dims(gradient), dims(value)
        if not may_be_equal(have, want):
            raise AutodiffError(f"{title}: gradient of input {index} has shape {list(have)}, the input {list(want)}")
