"""`checkpoint`: mark what the way back computes again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from numbers import Integral
from typing import Literal

import onnx_ir as ir

from archipel.autodiff.activity import reads_content
from archipel.autodiff.ports import listed_names
from archipel.autodiff.recompute import SEGMENT
from archipel.autodiff.segments import Costs, Run, gradient_peak
from archipel.errors import AutodiffError, GraphError
from archipel.graph.flops import flops
from archipel.graph.model import Model
from archipel.graph.shapes import is_float
from archipel.graph.walk import descendants

BATCH = 32
_TRIES = 5
_SLACK = 1.02  # over the smallest memory: the same memory, nearly, often needs much less work


def checkpoint(
    model: Model, at: Literal["auto"] | Sequence[str] = "auto", budget_bytes: int | None = None, *, batch: int = BATCH
) -> Model:
    """Mark parts of a model whose values its gradients compute once more, to need less memory and more time.

    The result computes what `model` computes, with the same nodes; `gradient`, `vjp` and step graphs of it keep only
    the values between the parts, and compute the others again on the way back (Chen et al., Training Deep Nets with
    Sublinear Memory Cost, 2016). The gradients are the same.

    Arguments:
        model: any model; it stays as it is. Marks that it has are replaced.
        at: names of values to keep, each the end of a part; values that a later part reads are kept as well, and so is
            everything behind the last one. "auto" chooses the parts.
        budget_bytes: with "auto", the most bytes of intermediate values that the gradient of all floating-point outputs
            with respect to all parameters may need at once; weights, inputs and outputs are not counted. Of the choices
            within it, the one with the least work is taken. None: as little memory as one more computation reaches.
        batch: for "auto", the size of symbolic dimensions, and how many iterations a loop is taken to have that only
            its condition ends.

    Raises AutodiffError for an unknown name, for a budget that is not reached (it names the smallest that is), and the
    errors of `vjp`; GraphError for a budget where only its condition ends a loop, so that memory has no bound.

    Example:
        small = autodiff.gradient(autodiff.checkpoint(model), of="loss", wrt=model.parameter_names)
    """
    for name, number, unit in (("budget_bytes", budget_bytes, "bytes"), ("batch", batch, "examples")):
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral) or number < 1):
            raise AutodiffError(f"checkpoint: {name} must be a whole number of {unit}, 1 or more, is {number!r}")
    result = model.copy()
    if isinstance(at, str) and at == "auto":
        targets = [str(value.name) for value in result.ir.graph.outputs if is_float(value)]
        wrt = _differentiable(result)
        if targets and wrt:
            mark_best(result.ir, targets, wrt, budget_bytes, batch, flops_of(result, batch))
        return result
    if budget_bytes is not None:
        raise AutodiffError("checkpoint: budget_bytes chooses the parts, and so do names in at; give one of the two")
    _mark(result.ir.graph, _runs_between(result.ir.graph, listed_names(at, "at")))
    return result


def mark_best(
    model: ir.Model,
    targets: Sequence[str],
    wrt: Sequence[str],
    budget: int | None,
    batch: int,
    work: dict[str, int],
) -> None:
    """Mark the best parts for the gradient of `targets` with respect to `wrt`. Changes the metadata of `model`."""
    _unmark(model.graph)
    inside = _computed_from_inputs(model.graph, wrt)
    costs = Costs(model, targets, wrt, lambda node: any(v in inside for v in node.outputs), batch, work)
    smallest = costs.smallest() * _SLACK
    if budget is None:
        _mark(model.graph, costs.plan(smallest), inside)
        return
    found = gradient_peak(model, targets, wrt, batch)
    if found <= budget:
        return
    # The costs are estimates: each choice is looked at as the graph that it makes, and the next aims higher or lower.
    best: list[Run] | None = None
    low, high, reached = smallest, costs.everything, [found]
    aim = budget * costs.everything / found
    for _ in range(_TRIES):
        aim = max(aim, smallest)
        runs = costs.plan(aim)
        _mark(model.graph, runs, inside)
        found = gradient_peak(model, targets, wrt, batch)
        reached.append(found)
        if found <= budget:
            best, low = runs, aim
        else:
            high = aim
        if high <= low * _SLACK:
            break
        aim = (low + high) / 2 if best else aim * 0.98 * budget / found
    if best is not None:
        _mark(model.graph, best, inside)
        return
    raise AutodiffError(
        f"a budget of {budget} bytes for intermediate values is not reached with batches of {batch}; the smallest that "
        f"is: {min(reached)}"
    )


def flops_of(model: Model, batch: int) -> dict[str, int]:
    """FLOPs by node for a batch; none where they have no bound, and the bytes that are moved decide alone."""
    try:
        return {name: count * batch for name, count in flops(model).items()}
    except GraphError:
        return {}


def _differentiable(model: Model) -> list[str]:
    graph = model.ir.graph
    values = [graph.initializers[name] for name in model.parameter_names] or list(graph.inputs)
    return [str(value.name) for value in values if is_float(value)]


def _computed_from_inputs(graph: ir.Graph, weights: Collection[str] = ()) -> set[ir.Value]:
    """Results that depend on what inputs contain: not on weights alone, and not on shapes alone."""
    data = [value for value in graph.inputs if value.name not in weights]
    return descendants(filter(reads_content, graph), data or graph.inputs) - set(graph.inputs)


def _runs_between(graph: ir.Graph, names: Sequence[str]) -> list[Run]:
    place = {value.name: index for index, node in enumerate(graph) for value in node.outputs}
    for name in names:
        if name not in place:
            raise AutodiffError(f"checkpoint: at: no node of the model computes a value {name!r}")
    ends = sorted({place[name] + 1 for name in names})
    return [Run(start, stop) for start, stop in zip([0, *ends], ends)]


def _mark(graph: ir.Graph, runs: Iterable[Run], inside: Collection[ir.Value] | None = None) -> None:
    _unmark(graph)
    inside = _computed_from_inputs(graph) if inside is None else inside
    nodes = list(graph)
    for number, run in enumerate(runs):
        for node in nodes[run.start : run.stop]:
            if any(value in inside for value in node.outputs):
                node.metadata_props[SEGMENT] = f"segment_{number}"


def _unmark(graph: ir.Graph) -> None:
    for node in graph:
        node.metadata_props.pop(SEGMENT, None)
