"""BatchNormalization folded into the layer before it, as numbers and as a graph that follows training.

With f = scale / sqrt(variance + epsilon) for each channel the layer's weight becomes weight f, and its bias
(bias - mean) f + shift (Jacob et al. 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime

from archipel.autodiff.rules.normalization import EPSILON
from archipel.graph.build import Builder
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.passes import remove_dead_code
from archipel.graph.shapes import constant_array

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_TYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Fold:
    """One layer that took over a BatchNormalization; the fields are names of tensors.

    `weight` and `bias` are the folded ones, and also what `weight` is made of; `before` is the layer's own bias, if it
    had one. `values` has the content of everything that is read, as it was before.
    """

    weight: str
    bias: str
    before: str | None
    scale: str
    shift: str
    mean: str
    variance: str
    epsilon: float
    axis: int
    groups: int
    values: Mapping[str, np.ndarray]

    def emit(self, op: Builder, read: Callable[[str], ir.Value]) -> dict[str, ir.Value]:
        """The folded weight and bias by name, made of the tensors that `read` gives for their names."""
        factor = op.Div(read(self.scale), op.Sqrt(op.Add(read(self.variance), self.epsilon)))
        size = self.values[self.weight].shape
        # A ConvTranspose counts its channels group by group, and a group has weights for its own ones only.
        grouped = op.Reshape(read(self.weight), [self.groups, size[0] // self.groups, *size[1:]])
        along = [self.groups, *(-1 if i == self.axis else 1 for i in range(len(size)))]
        weight = op.Reshape(op.Mul(grouped, op.Reshape(factor, along)), list(size))
        before = op.Neg(read(self.mean)) if self.before is None else op.Sub(read(self.before), read(self.mean))
        return {self.weight: weight, self.bias: op.Add(op.Mul(before, factor), read(self.shift))}


def fold_batch_norm(model: ir.Model) -> list[Fold]:
    """Fold each BatchNormalization into the Conv, ConvTranspose or Gemm before it, where nothing else reads its result.

    The layer's weight keeps its name, a bias that it did not have is called `<weight>_bias`. What stays: a layer whose
    weight is used twice, and tensors that are computed. Changes `model`, whose BatchNormalization must be in inference
    mode. Returns what was folded, in the graph's order.
    """
    known = set(parameter_names(model))
    names = Builder(model.graph)
    folds = []
    for node in list(model.graph):
        found = _fold_of(node, known, names)
        if found is not None:
            folds.append(found)
            known.add(found.bias)
            _take_over(model, node, found)
    if folds:
        remove_dead_code(model)
        record_parameters(model, [name for name in model.graph.initializers if name in known])
    return folds


def is_batch_norm(node: ir.Node) -> bool:
    return node.op_type == "BatchNormalization" and node.domain == ""


def _fold_of(node: ir.Node, known: Collection[str], names: Builder) -> Fold | None:
    layer = _layer(node)
    if layer is None or layer.inputs[1] is None or len(list(layer.inputs[1].uses())) > 1:
        return None
    own = layer.inputs[2] if len(layer.inputs) > 2 else None
    if own is not None and own.name not in known and (zeros := _content(own)) is not None and not zeros.any():
        own = None  # of an exporter that always writes a bias
    tensors = [layer.inputs[1], *node.inputs[1:5], *([own] if own is not None else [])]
    contents = {_name(value): _content(value) for value in tensors}
    values = {name: content for name, content in contents.items() if content is not None}
    if len(values) < len(contents):
        return None
    axis, groups = _channels(layer)
    weight, *vectors = map(_name, tensors)
    size = (values[weight].shape[axis] * groups,)
    if any(values[name].shape != size or values[name].dtype.name not in _TYPES for name in vectors):
        return None
    scale, shift, mean, variance, *bias = vectors
    kept = own is not None and own.name in known and len(list(own.uses())) == 1
    return Fold(
        weight=weight, bias=bias[0] if kept else names.unique(f"{weight}_bias"), before=bias[0] if bias else None,
        scale=scale, shift=shift, mean=mean, variance=variance,
        epsilon=node.attributes.get_float("epsilon", EPSILON), axis=axis, groups=groups, values=values,
    )  # fmt: skip


def _layer(node: ir.Node) -> ir.Node | None:
    """The layer that can take over this node."""
    source = node.inputs[0] if is_batch_norm(node) and len(node.inputs) == 5 else None
    layer = None if source is None else source.producer()
    if source is None or layer is None or layer.op_type not in _LAYERS or layer.domain != "":
        return None
    alone = len(list(source.uses())) == 1 and not source.is_graph_output() and layer.graph is node.graph
    scaled = layer.op_type == "Gemm" and layer.attributes.get_float("beta", 1.0) != 1.0
    return layer if alone and not scaled else None


def _channels(layer: ir.Node) -> tuple[int, int]:
    """The axis of the weight that has the output's channels, and how many groups of them share it."""
    if layer.op_type == "ConvTranspose":
        return 1, layer.attributes.get_int("group", 1)
    return int(layer.op_type == "Gemm" and not layer.attributes.get_int("transB", 0)), 1


def _content(value: ir.Value | None) -> np.ndarray | None:
    return constant_array(value) if value is not None and value.is_initializer() else None


def _name(value: ir.Value | None) -> str:
    return "" if value is None or value.name is None else value.name


def _take_over(model: ir.Model, node: ir.Node, fold: Fold) -> None:
    layer = node.inputs[0].producer() if node.inputs[0] is not None else None
    if layer is None:
        return
    layer.resize_inputs(3)
    for index, (name, content) in enumerate(_computed(fold).items(), start=1):
        tensor = ir.tensor(content, name=name)
        value = model.graph.initializers.get(name)
        if value is None:
            value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(content.shape))
            value.const_value = tensor
            model.graph.register_initializer(value)
        value.const_value = tensor
        layer.replace_input_with(index, value)
    result, output = layer.outputs[0], node.outputs[0]
    result.name, output.name = output.name, result.name
    output.replace_all_uses_with(result, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def _computed(fold: Fold) -> dict[str, np.ndarray]:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="fold")
    op = Builder(graph)
    results = fold.emit(op, lambda name: op.constant(fold.values[name]))
    for place, value in enumerate(results.values()):
        op.name_output(value, f"folded_{place}")
    data = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return dict(zip(results, session.run(None, {})))
