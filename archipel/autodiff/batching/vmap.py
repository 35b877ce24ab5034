"""`vmap`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from archipel.autodiff.batching.sweep import Sweep
from archipel.autodiff.ports import listed_names
from archipel.errors import AutodiffError
from archipel.graph.build import Builder
from archipel.graph.model import Model
from archipel.graph.parameters import parameter_names, promote
from archipel.graph.passes import optimize
from archipel.graph.passes.constants import hide_contents
from archipel.graph.shapes import dims
from archipel.graph.walk import levels

LANES = "lanes"


def vmap(model: Model, over: Sequence[str], size: int | None = None, *, optimized: bool = True) -> Model:
    """The same computation for many lanes at once: inputs and parameters get a new leading axis, and so does everything
    that depends on them.

    Lane i of each output is what `model` gives for lane i of the inputs in `over`, with all other inputs the same in
    all lanes. So vmap over the parameters of a model is an ensemble, over the inputs of a step graph it trains many
    clients at once, and over an example's inputs of a gradient it gives per-example gradients. vmap of vmap, of a
    gradient and of a step graph work, and so do derivatives of vmap.

    Arguments:
        model: any model; it stays as it is.
        over: names of graph inputs and initializers (weights), of any type: also labels, integers, booleans, and
            `seed`, with which each lane draws random numbers of its own.
        size: how many lanes there are; None leaves it open, as the symbolic dimension "lanes" ("lanes_2", ... if the
            model has that name).
        optimized: whether the result is cleaned up, as a graph that is differentiated, printed or kept should be. An
            engine that optimizes by itself, such as ONNX Runtime, runs the other as fast, and it is made in half the
            time.

    Returns a model with the inputs and outputs of `model` under the same names. Those in `over` have the shape
    [size, ...], as have outputs that depend on them; other outputs stay as they are. A parameter in `over` keeps its
    name: with `size` it holds its content `size` times, to be overwritten where lanes have other weights; without
    `size` it becomes an input behind the others, so that the caller gives each lane's weights. Operators without a
    batching rule run lane by lane in a Scan. Of a program of a bundle, the result has names and `initial` (repeated for
    tensors in `over`), and no signature.

    Raises AutodiffError for a name that is no input or initializer, a name given twice, an empty `over`, a size below
    1, and a node whose result would have another shape in each lane.

    Example:
        clients = autodiff.vmap(step, over=["input", "label", "fc.weight", "fc.bias"], size=32)
    """
    names = listed_names(over, "over")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise AutodiffError(f"size={size!r}; expected the number of lanes, at least 1, or None for any number")
    source = model.copy()
    graph = source.ir.graph
    given = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    for name in names:
        if name not in given:
            raise AutodiffError(
                f"over: the model has no input or initializer {name!r}; it has: {', '.join(map(str, given))}"
            )
    if size is None:
        promote(source.ir, [name for name in names if not given[name].is_graph_input()])
    target = ir.Graph(
        [], [], nodes=[], name=graph.name, doc_string=graph.doc_string, opset_imports=dict(graph.opset_imports),
        metadata_props=dict(graph.metadata_props),
    )  # fmt: skip
    result = ir.Model(
        target, ir_version=source.ir.ir_version, producer_name=source.ir.producer_name,
        producer_version=source.ir.producer_version, domain=source.ir.domain, model_version=source.ir.model_version,
        doc_string=source.ir.doc_string, functions=list(source.ir.functions.values()),
        metadata_props=dict(source.ir.metadata_props),
    )  # fmt: skip
    op = Builder(target)
    op.reserve(graph)
    _build(op, graph, [given[name] for name in names], size)
    if optimized and not result.functions:  # functions keep the gradient rules that were registered for them
        with hide_contents(target, parameter_names(result)):
            optimize(result)
    return Model(result, initial=_initial(model, names, size))


def _build(op: Builder, graph: ir.Graph, over: Sequence[ir.Value], size: int | None) -> None:
    """Emit the whole graph with lanes."""
    sweep = Sweep(op, _free_dimension(graph) if size is None else size)
    sweep.enter(graph, over)
    sweep.run(graph)
    for old in graph.outputs:
        new = sweep.value(old)
        if old.is_graph_input() or old.is_initializer():
            op.graph.outputs.append(new)
        elif old in sweep.batched or new.name != old.name:
            op.name_output(new, str(old.name))
        else:
            op.graph.outputs.append(new)


def _free_dimension(graph: ir.Graph) -> str:
    used: set[object] = set()
    for level in levels(graph):
        values = [*level.inputs, *level.outputs, *(value for node in level for value in node.outputs)]
        used.update(d for value in values if value.shape is not None for d in dims(value))
    name, number = LANES, 1
    while name in used:
        number += 1
        name = f"{LANES}_{number}"
    return name


def _initial(model: Model, over: Sequence[str], size: int | None) -> Mapping[str, np.ndarray]:
    """The values that inputs start from, for all lanes; without a number of lanes, those of inputs in `over` are left
    out."""
    tensors = (
        {port.name: getattr(port, "tensor", port.name) for port in model.signature.inputs} if model.signature else {}
    )
    moved = {tensors.get(name, name) for name in over}
    found = {}
    for name, content in model.initial.items():
        if name not in moved:
            found[name] = content
        elif size is not None:
            found[name] = np.repeat(content[None], size, axis=0)
    return found
