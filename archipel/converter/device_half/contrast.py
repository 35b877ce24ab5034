"""Model-contrastive training (Li et al. 2021): one graph with the features of three models, and a loss of them.

The trained model is differentiated. For the two others, the model as received and the device's model of its last round,
the nodes in front of the features are there once more, with these models' weights as inputs and without Dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from archipel.bundle.roles import Port, Start, State
from archipel.converter.device_half.adapter_forms import static
from archipel.converter.device_half.added_loss import AddedLoss
from archipel.errors import ConversionError
from archipel.graph import Builder, Model
from archipel.graph.bodies import copy_node
from archipel.graph.functions import inline_functions
from archipel.graph.shapes import dtype_of, rank
from archipel.graph.walk import ancestors, dependencies, descendants
from archipel.strategies.device import PREVIOUS, Contrast
from archipel.training.dropout import is_dropout
from archipel.training.losses import Loss

_VALUE = "contrast/loss"
"""The contrastive loss of each example in the graph, `[batch]`, as the graph's second output."""
_LAYERS = ("Gemm", "MatMul", "Conv")
_TINY = 1e-12


class ContrastiveLoss(AddedLoss):
    """Adds the contrastive loss of the example, which the graph has under the name `contrast/loss`."""

    def term(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        return next(value for node in op.main for value in node.outputs if value.name == _VALUE)


def contrasted(
    model: Model, loss: Loss, names: Sequence[str], term: Contrast, strategy: str
) -> tuple[Model, Loss, dict[str, Port]]:
    """The model with the contrastive loss in its graph, the loss that adds it, and the roles of the new inputs by name.

    -log(e^(s_g / t) / (e^(s_g / t) + e^(s_p / t))) with s_g, s_p the cosines between the features and those of the
    received and of the previous model, is softplus((s_p - s_g) / t). `names` are the trained parameters.

    Raises ConversionError where the features are not found, or do not depend on a trained parameter.
    """
    work = model.copy()
    inline_functions(work.ir)
    graph = work.ir.graph
    features = _find_features(graph, term.features, strategy)
    trained = {name: graph.initializers[name] for name in names}
    # What depends on no trained tensor is the same in all three models.
    moving = descendants(graph, list(trained.values()))
    needed = ancestors(graph, [features])
    read = {name: value for name, value in trained.items() if value in needed}
    if not read:
        raise ConversionError(
            f"strategy {strategy!r}: features: {features.name!r} depends on no trained tensor; name a later value"
        )
    between = [node for node in graph if any(value in needed and value in moving for value in node.outputs)]
    op = Builder(graph, scope="contrast")
    roles: dict[str, Port] = {}
    others = []
    for start in (True, False):
        there: dict[ir.Value, ir.Value] = {}
        for name, value in read.items():
            shape = static(value)
            port = _port(name, value, shape, start)
            roles[port.name] = port
            there[value] = op.input(port.name, dtype_of(value), shape)
        others.append(_again(op, between, there)[features])
    # The values of examples are compared in one row each.
    own, received, previous = (op.Flatten(value, axis=1) for value in (features, *others))
    away = op.Sub(_cosine(op, own, previous), _cosine(op, own, received))
    found = op.Softplus(op.Mul(away, 1.0 / term.temperature))
    op.name_output(found, _VALUE)
    return Model(work.ir), ContrastiveLoss(loss, term.strength), roles


def _port(name: str, value: ir.Value, shape: tuple[int, ...], start: bool) -> Port:
    dtype = dtype_of(value).numpy().name
    if start:
        return Start(name=f"{name}.start", tensor=name, dtype=dtype, shape=shape)  # type: ignore[arg-type]
    tensor = PREVIOUS + name
    return State(name=tensor, tensor=tensor, dtype=dtype, shape=shape, lifetime="device", init=name)  # type: ignore[arg-type]


def _again(op: Builder, nodes: Sequence[ir.Node], there: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Emit the nodes once more with other weights, and without Dropout, as a model that is not trained."""
    found = dict(there)
    for node in nodes:
        if is_dropout(node) and node.inputs[0] is not None:
            found[node.outputs[0]] = found.get(node.inputs[0], node.inputs[0])
            continue
        found.update(zip(node.outputs, copy_node(op, node, found).outputs))
    return found


def _cosine(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The cosine between the rows, 0 for a row of zeros."""

    def length(value: ir.Value) -> ir.Value:
        return op.Sqrt(op.Max(op.ReduceSumSquare(value, [1], keepdims=0), _TINY))

    return op.Div(op.ReduceSum(op.Mul(a, b), [1], keepdims=0), op.Mul(length(a), length(b)))


def _find_features(graph: ir.Graph, name: str | None, strategy: str) -> ir.Value:
    """The value called `name`; None: what the last layer reads, which makes the model's first output."""
    fields = descendants(graph, graph.inputs)
    if name is not None:
        found = next((value for node in graph for value in node.outputs if value.name == name), None)
        if found is None or found not in fields or rank(found) < 2:
            raise ConversionError(
                f"strategy {strategy!r}: features: the graph computes no value {name!r} [batch, ...] of its inputs; "
                "`archipel inspect` lists the names"
            )
        return found
    value = graph.outputs[0]
    while (node := value.producer()) is not None:
        computed = [each for each in dependencies(node) if each in fields]
        if len(computed) != 1:
            break
        if node.op_type in _LAYERS and computed[0].producer() is not None and rank(computed[0]) > 1:
            return computed[0]
        value = computed[0]
    raise ConversionError(
        f"strategy {strategy!r}: no last layer is found that makes the first output of features; name these with "
        "strategy_options={'features': ...}"
    )
