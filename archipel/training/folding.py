"""BatchNormalization folded into the layer before it, as numbers and as a graph that follows training.

With f = scale / sqrt(variance + epsilon) for each channel the layer's weight becomes weight f, and its bias
(bias - mean) f + shift (Jacob et al. 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime

from archipel.autodiff.rules.normalization import EPSILON
from archipel.graph.build import Builder
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.passes import remove_dead_code
from archipel.graph.passes.constants import constant_values
from archipel.graph.shapes import constant_array, dims, is_static
from archipel.graph.walk import levels, only_reader

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_TYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Fold:
    """One layer with a BatchNormalization folded into it. The fields are names of tensors.

    `weight` names the layer's weight, before and after, `bias` the folded bias, `before` the bias that the layer had of
    its own, if any. `values` has the contents before folding of all tensors that `emit` reads.
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
        """Emit the folded weight and bias, by name; `read` gives the tensor of a name."""
        before = None if self.before is None else read(self.before)
        statistics = [read(name) for name in (self.scale, self.shift, self.mean, self.variance)]
        weight, bias = _folded(op, read(self.weight), before, statistics, self.epsilon, self.axis, self.groups)
        return {self.weight: weight, self.bias: bias}


def fold_batch_norm(model: ir.Model) -> list[Fold]:
    """Fold each BatchNormalization into the Conv, ConvTranspose or Gemm before it, where nothing else reads its result.

    The layer's weight keeps its name; a new bias is called `<weight>_bias`. A layer whose weight is used twice, or with
    computed tensors, is left as it is. Changes `model`, whose BatchNormalization must be in inference mode. Returns the
    folds in the graph's order.
    """
    known = set(parameter_names(model))
    names = Builder(model.graph)
    folds = []
    for node in list(model.graph.all_nodes()):
        fold = _fold_of(node, known, names)
        if fold is not None:
            folds.append(fold)
            known.add(fold.bias)
            _take_over(model, node, fold)
    if folds:
        remove_dead_code(model)
        record_parameters(model, [name for name in model.graph.initializers if name in known])
    return folds


def fold_batch_norm_symbolic(model: ir.Model) -> int:
    """Fold as `fold_batch_norm`, but as nodes that compute the folded tensors from the old ones, which stay.

    So the folded weight (`<weight>_folded`) and bias (`<weight>_folded_bias`) follow a parameter that moves. Weights
    may be computed (masked) and used twice. Layers whose weight comes out of a DequantizeLinear are left as they are,
    since the product of such a weight has no integers. Changes `model`, whose BatchNormalization must be in inference
    mode. Returns the number of folds.
    """
    fixed = constant_values(model.graph)
    main = Builder(model.graph)
    count = 0
    for level in levels(model.graph):
        op = main if level is model.graph else Builder(level, outer=main)
        for node in list(level):
            layer = _layer(node)
            if layer is not None and _fold_symbolically(op, node, layer, fixed):
                count += 1
    if count:
        model.graph.sort()  # statistics may be laid out behind the layer that now reads them
        known = parameter_names(model)
        remove_dead_code(model)
        record_parameters(model, [name for name in known if name in model.graph.initializers])
    return count


def is_batch_norm(node: ir.Node) -> bool:
    return node.op_type == "BatchNormalization" and node.domain == ""


def _fold_of(node: ir.Node, known: Collection[str], names: Builder) -> Fold | None:
    layer = _layer(node)
    if layer is None or layer.inputs[1] is None or len(list(layer.inputs[1].uses())) > 1:
        return None
    own = layer.inputs[2] if len(layer.inputs) > 2 else None
    # Some exporters always write a bias; one of zeros that is no parameter is as good as none.
    if own is not None and own.name not in known and (zeros := _content(own)) is not None and not zeros.any():
        own = None
    tensors = [layer.inputs[1], *node.inputs[1:5], *([own] if own is not None else [])]
    contents = {_name(value): _content(value) for value in tensors}
    values = {name: content for name, content in contents.items() if content is not None}
    if len(values) < len(contents):
        return None  # a tensor is computed
    axis, groups = _channels(layer)
    weight, *vectors = map(_name, tensors)
    size = (values[weight].shape[axis] * groups,)
    if any(values[name].shape != size or values[name].dtype.name not in _TYPES for name in vectors):
        return None
    scale, shift, mean, variance, *bias = vectors
    # A bias that is a parameter keeps its name, unless another layer reads it as well.
    kept = own is not None and own.name in known and len(list(own.uses())) == 1
    return Fold(
        weight=weight, bias=bias[0] if kept else names.unique(f"{weight}_bias"), before=bias[0] if bias else None,
        scale=scale, shift=shift, mean=mean, variance=variance,
        epsilon=node.attributes.get_float("epsilon", EPSILON), axis=axis, groups=groups, values=values,
    )  # fmt: skip


def _fold_symbolically(op: Builder, node: ir.Node, layer: ir.Node, fixed: set[ir.Value]) -> bool:
    weight, own = layer.inputs[1], layer.inputs[2] if len(layer.inputs) > 2 else None
    tensors = [value for value in node.inputs[1:5] if value is not None]
    if weight is None or any(value not in fixed for value in (weight, *tensors, *([own] if own is not None else []))):
        return False
    axis, groups = _channels(layer)
    size = dims(weight)
    channels = size[axis] * groups if is_static(size) else None  # type: ignore[operator]
    vectors = [*tensors, *([own] if own is not None else [])]
    # One number for each channel, in the weight's type: the formula neither broadcasts nor casts.
    same = all(dims(value) == (channels,) and value.dtype == weight.dtype for value in vectors)
    maker = weight.producer()
    if not same or weight.dtype is None or weight.dtype.numpy().name not in _TYPES:
        return False
    if maker is not None and maker.op_type == "DequantizeLinear":
        return False
    with op.before(layer), op.scope(f"{weight.name}_folding"):
        epsilon = node.attributes.get_float("epsilon", EPSILON)
        folded = _folded(op, weight, own, tensors, epsilon, axis, groups)
    layer.resize_inputs(3)
    for index, (value, name) in enumerate(zip(folded, ("folded", "folded_bias")), start=1):
        value.name = op.unique(f"{weight.name}_{name}")
        layer.replace_input_with(index, value)
        fixed.add(value)
    _skip(node, layer)
    return True


def _folded(
    op: Builder,
    weight: ir.Value,
    bias: ir.Value | None,
    statistics: Sequence[ir.Value],
    epsilon: float,
    axis: int,
    groups: int,
) -> tuple[ir.Value, ir.Value]:
    """The folded weight and bias; `statistics` are scale, shift, mean and variance."""
    scale, shift, mean, variance = statistics
    factor = op.Div(scale, op.Sqrt(op.Add(variance, epsilon)))
    size = [d for d in dims(weight) if isinstance(d, int)]
    if groups == 1:
        product = op.Mul(weight, op.Reshape(factor, [-1 if i == axis else 1 for i in range(len(size))]))
    else:
        # ConvTranspose: [inputs, outputs / groups, ...], where each group of inputs makes its own outputs. With the
        # groups as an axis of its own every output channel has one place, and so one factor.
        grouped = op.Reshape(weight, [groups, size[0] // groups, *size[1:]])
        along = [groups, *(-1 if i == axis else 1 for i in range(len(size)))]
        product = op.Reshape(op.Mul(grouped, op.Reshape(factor, along)), size)
    before = op.Neg(mean) if bias is None else op.Sub(bias, mean)  # (x + bias - mean) factor + shift
    return product, op.Add(op.Mul(before, factor), shift)


def _layer(node: ir.Node) -> ir.Node | None:
    """The layer into which this node, if it is a BatchNormalization, can be folded."""
    source = node.inputs[0] if is_batch_norm(node) and len(node.inputs) == 5 else None
    layer = None if source is None else source.producer()
    if source is None or layer is None or layer.op_type not in _LAYERS or layer.domain != "":
        return None
    # Another reader of the layer's result needs it without the normalization; beta would scale the folded bias.
    alone = only_reader(source) is not None and layer.graph is node.graph
    scaled = layer.op_type == "Gemm" and layer.attributes.get_float("beta", 1.0) != 1.0
    return layer if alone and not scaled else None


def _channels(layer: ir.Node) -> tuple[int, int]:
    """The axis of the weight that has the output's channels, and how many groups of channels share that axis."""
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
    _skip(node, layer)


def _skip(node: ir.Node, layer: ir.Node) -> None:
    """Let the layer's result take the place and the name of the node's, and remove the node."""
    result, output = layer.outputs[0], node.outputs[0]
    result.name, output.name = output.name, result.name
    output.replace_all_uses_with(result, replace_graph_outputs=True)
    if node.graph is not None:
        node.graph.remove(node, safe=True)


def _computed(fold: Fold) -> dict[str, np.ndarray]:
    # Run as a graph: the formula is then the one that the symbolic fold emits.
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="fold")
    op = Builder(graph)
    results = fold.emit(op, lambda name: op.constant(fold.values[name]))
    for place, value in enumerate(results.values()):
        op.name_output(value, f"folded_{place}")
    data = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return dict(zip(results, session.run(None, {})))
