"""Which value of a graph corresponds to which value of a graph made from it: by name, by weight, by structure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from archipel.graph import Model
from archipel.graph.shapes import FLOATS
from archipel.graph.walk import dependents, only_reader, origins, trace_back

# Operator -> where its weight is among the inputs.
_WEIGHTS = {
    "Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1, "ConvInteger": 1, "MatMulInteger": 1, "QLinearConv": 3,
    "QLinearMatMul": 3, "QGemm": 3, "LSTM": 1, "GRU": 1, "RNN": 1,
}  # fmt: skip
_SCALED_LATER = ("ConvInteger", "MatMulInteger")  # their int32 becomes float by Cast and Mul
# Operator -> the input that is the scale of its integer result; the zero point comes after it.
_SCALES = {
    "QLinearConv": 6, "QLinearMatMul": 6, "QLinearAdd": 6, "QLinearMul": 6, "QGemm": 7, "QLinearConcat": 0,
    "QLinearGlobalAveragePool": 3, "QLinearAveragePool": 3, "QLinearSigmoid": 3, "QLinearLeakyRelu": 3,
    "QLinearSoftmax": 3,
}  # fmt: skip
_KEEP_SCALE = ("MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "Gather")
_AFFINE = ("BatchNormalization", "Add", "Sub", "Mul", "Div")  # with constants
_CLIPS = ("Relu", "Clip")  # the range of an integer clips too, so quantizers leave them out
_PASSED = ("Identity", "Cast", "QuantizeLinear", "DequantizeLinear")
_QUANTIZE = ("QuantizeLinear", "DynamicQuantizeLinear")
# Suffixes that onnxruntime.quantization appends to a tensor's name.
_SUFFIXES = (
    "_QuantizeLinear_Input", "_QuantizeLinear_Output", "_DequantizeLinear_Output", "_DequantizeLinear", "_quantized",
    "_output_quantized",
)  # fmt: skip


@dataclass(eq=False)
class Reading:
    """A value that can be read as float numbers.

    `value` is the one to read: of a tensor that is quantized and dequantized, the dequantized one, which later nodes
    read. `scale` and `zero_point` dequantize a `value` of integers. `node` computes the tensor as its output `index`;
    `names` are all its names in the graph, its own first.
    """

    value: ir.Value
    node: ir.Node
    index: int
    names: list[str] = field(default_factory=list)
    scale: ir.Value | None = None
    zero_point: ir.Value | None = None
    output: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(eq=False)
class Layer:
    """A node with a weight, and the values behind it that other graphs may have folded into the node.

    `affine`: outputs of the node and of scaling and shifting behind it; `clipped`: that of an activation behind those.
    Each comes with the type of its operator, "" for the node itself. `clips_later`: the activation is behind a pooling
    that only reads this layer, where deployment puts it.
    """

    node: ir.Node
    weights: frozenset[str]
    affine: list[tuple[str, Reading]] = field(default_factory=list)
    clipped: list[tuple[str, Reading]] = field(default_factory=list)
    clips_later: bool = False


class Readings:
    """The float values of a graph that depend on its inputs, in the graph's order."""

    def __init__(self, model: Model) -> None:
        self.graph = model.ir.graph
        self.moving: set[ir.Value] = set(self.graph.inputs)
        self.of: dict[ir.Value, Reading] = {}
        self.all: list[Reading] = []
        scales: dict[ir.Value, tuple[ir.Value | None, ...]] = {}
        for node in dependents(self.graph, self.graph.inputs):
            self.moving.update(node.outputs)
            for index, value in enumerate(node.outputs):
                if value.name:
                    self._read(node, index, value, scales)

    def _read(
        self, node: ir.Node, index: int, value: ir.Value, scales: dict[ir.Value, tuple[ir.Value | None, ...]]
    ) -> None:
        source = node.inputs[0] if node.inputs else None
        before = None if source is None else self.of.get(source)
        # The quantized and the dequantized form of a tensor are further names of its reading, no readings of their own.
        if node.op_type in _QUANTIZE:
            # A quantized input of the graph is no value of the network.
            if before is not None and index == 0:
                self._add_name(before, value)
            return
        if node.op_type == "DequantizeLinear" and _source(value).is_graph_input():
            return
        if node.op_type == "DequantizeLinear" and before is not None:
            # Integers become readable here; of a float tensor, only if nothing reads its exact form.
            if before.scale is not None or _always_quantized(before.value):
                before.value, before.scale, before.zero_point = value, None, None
            self._add_name(before, value)
            before.output = before.output or value.is_graph_output()
            return
        if node.op_type in _SCALES:
            at = _SCALES[node.op_type]
            scales[value] = (node.inputs[at], node.inputs[at + 1] if len(node.inputs) > at + 1 else None)
        elif node.op_type in _KEEP_SCALE and source in scales:
            scales[value] = scales[source]
        scale, zero_point = scales.get(value, (None, None))
        if scale is None and value.dtype is not None and value.dtype not in FLOATS:
            return
        reading = Reading(value, node, index, [], scale, zero_point, value.is_graph_output())
        self._add_name(reading, value)
        self.all.append(reading)

    def _add_name(self, reading: Reading, value: ir.Value) -> None:
        self.of[value] = reading
        name = value.name or ""
        plain = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
        reading.names += [n for n in dict.fromkeys((name, plain)) if n not in reading.names]

    def layers(self, known: Collection[str] | None = None) -> list[Layer]:
        """The nodes with weights. `known` are the names of weights in the graph that this one was made from."""
        layers = []
        for node in self.graph:
            weight = self._weight(node)
            if weight is not None and any(value in self.moving for value in node.inputs if value is not None):
                names = _roots(weight)
                layer = Layer(node, frozenset(names if known is None else _known_names(names, known)))
                self._follow(layer)
                if layer.affine:
                    layers.append(layer)
        return layers

    def _weight(self, node: ir.Node) -> ir.Value | None:
        at = _WEIGHTS.get(node.op_type)
        if at is None or len(node.inputs) <= at:
            return None
        for index in (at, 0):
            value = node.inputs[index]
            if value is not None and value not in self.moving:
                return value
        return None

    def _follow(self, layer: Layer) -> None:
        """Collect the values behind the layer, as long as each has one reader that could be folded into the layer."""
        value, kind, scaling = layer.node.outputs[0], "", layer.node.op_type in _SCALED_LATER
        while True:
            # The int32 of an integer product is no value until it is scaled.
            reading = None if scaling or kind in _PASSED else self.of.get(value)
            if reading is not None and all(reading is not other for _, other in layer.affine):
                (layer.clipped if kind in _CLIPS else layer.affine).append((kind, reading))
            node = only_reader(value)
            if node is None or layer.clipped:
                return
            others = [v for v in node.inputs if v is not None and v is not value and v in self.moving]
            if scaling and node.op_type == "Mul":
                kind, scaling = "", False
            elif node.op_type in _PASSED or (node.op_type in (*_AFFINE, *_CLIPS) and not others and not scaling):
                kind = node.op_type
            else:
                after = only_reader(node.outputs[0]) if node.op_type == "MaxPool" else None
                layer.clips_later = after is not None and after.op_type in _CLIPS
                return
            value = node.outputs[0]


def match(a: Readings, b: Readings) -> list[tuple[Reading, Reading | None]]:
    """Each float value of `a`, in the graph's order, and the one of `b` that corresponds to it, if any.

    Matched in this order, the most certain first: graph outputs by name, or by position if their names differ; layers
    by the names of their weights; values by their names; then results of the same operator on corresponding values. A
    layer includes the normalization, scale, bias and Relu behind it: if one graph has them folded into the layer, only
    the last value is the same in both.
    """
    pairs = _Pairs()
    for first, second in _outputs(a, b):
        pairs.add(first, second)
    layers_a = a.layers()
    known = {name for layer in layers_a for name in layer.weights}
    layers_b = b.layers(known)
    for layer, other in _same_weight(layers_a, layers_b):
        pairs.align(layer, other)
    # Reversed, so that the first value with a name, and a value's own name, win.
    named = {name: reading for reading in reversed(b.all) for name in reversed(reading.names)}
    for reading in a.all:
        namesake = next((named[name] for name in reading.names if name in named), None)
        if namesake is not None:
            pairs.add(reading, namesake)
    _match_structure(a, b, pairs, {layer.node: layer for layer in layers_a}, {layer.node: layer for layer in layers_b})
    return [(reading, pairs.of.get(reading)) for reading in a.all]


class _Pairs:
    """Corresponding values, each in one pair at most; values in `_alone` must have no counterpart."""

    def __init__(self) -> None:
        self.of: dict[Reading, Reading] = {}
        self._taken: set[Reading] = set()
        self._alone: set[Reading] = set()

    def add(self, a: Reading, b: Reading) -> None:
        if a not in self.of and b not in self._taken and a not in self._alone and b not in self._alone:
            self.of[a] = b
            self._taken.add(b)

    def align(self, a: Layer, b: Layer) -> None:
        """Pair the values of two layers step by step if they have the same steps, else only the last ones."""
        if a.clips_later == b.clips_later and [kind for kind, _ in a.clipped] != [kind for kind, _ in b.clipped]:
            self._pair_ends([*a.affine, *a.clipped], [*b.affine, *b.clipped])
            return
        if [kind for kind, _ in a.affine] == [kind for kind, _ in b.affine]:
            for (_, first), (_, second) in zip(a.affine, b.affine):
                self.add(first, second)
        else:
            self._pair_ends(a.affine, b.affine)
        if a.clips_later == b.clips_later:
            for (_, first), (_, second) in zip(a.clipped, b.clipped):
                self.add(first, second)

    def _pair_ends(self, a: Sequence[tuple[str, Reading]], b: Sequence[tuple[str, Reading]]) -> None:
        self.add(a[-1][1], b[-1][1])
        # Inner steps have other values in the two graphs, even where a name or operator is the same.
        self._alone.update(reading for _, reading in (*a[:-1], *b[:-1]) if reading not in self._taken)


def _outputs(a: Readings, b: Readings) -> Iterator[tuple[Reading, Reading]]:
    by_name = {str(value.name): value for value in b.graph.outputs}
    same_count = len(a.graph.outputs) == len(b.graph.outputs)
    for index, value in enumerate(a.graph.outputs):
        other = by_name.get(str(value.name))
        if other is None and same_count and str(b.graph.outputs[index].name) not in {v.name for v in a.graph.outputs}:
            other = b.graph.outputs[index]
        if other is not None and value in a.of and other in b.of:
            yield a.of[value], b.of[other]


def _same_weight(a: Sequence[Layer], b: Sequence[Layer]) -> Iterator[tuple[Layer, Layer]]:
    weights = dict.fromkeys(name for layer in a for name in sorted(layer.weights))
    for name in weights:
        first, second = ([layer for layer in layers if name in layer.weights] for layers in (a, b))
        if len(first) == 1 and len(second) > 1:
            second = second[-1:]  # one layer became several in a row
        if len(first) == len(second):
            yield from zip(first, second)


def _match_structure(
    a: Readings, b: Readings, pairs: _Pairs, layers_a: dict[ir.Node, Layer], layers_b: dict[ir.Node, Layer]
) -> None:
    inputs = dict(_graph_inputs(a, b))
    # Of b: (operator, output, what it reads) -> values.
    by_inputs: dict[tuple[object, ...], list[Reading]] = {}
    for reading in b.all:
        by_inputs.setdefault((reading.node.op_type, reading.index, *_moving_inputs(reading, b)), []).append(reading)
    # In the graph's order: the inputs of a value have been paired before it, so that pairs spread down the graph.
    for reading in a.all:
        if reading in pairs.of:
            continue
        own_inputs = _moving_inputs(reading, a)
        wanted = [pairs.of.get(value) if isinstance(value, Reading) else inputs.get(value) for value in own_inputs]
        if None in wanted:
            continue
        alike = by_inputs.get((reading.node.op_type, reading.index, *wanted), [])
        # Several alike values cannot be told apart.
        if len(alike) == 1:
            layer, other = layers_a.get(reading.node), layers_b.get(alike[0].node)
            if layer is not None and other is not None:
                pairs.align(layer, other)
            else:
                pairs.add(reading, alike[0])


def _graph_inputs(a: Readings, b: Readings) -> Iterator[tuple[ir.Value, ir.Value]]:
    by_name = {value.name: value for value in b.graph.inputs}
    for index, value in enumerate(a.graph.inputs):
        other = by_name.get(value.name)
        if other is None and index < len(b.graph.inputs):
            other = b.graph.inputs[index]
        if other is not None:
            yield value, other


def _moving_inputs(reading: Reading, readings: Readings) -> list[Reading | ir.Value]:
    """The inputs of the node that depend on the examples: readings, or inputs of the graph."""
    moving = [value for value in reading.node.inputs if value is not None and value in readings.moving]
    return [readings.of.get(value) or _source(value) for value in moving]


def _source(value: ir.Value) -> ir.Value:
    """The value in front of casts and rounding: an input of the graph, where nothing else lies between."""
    return trace_back(value, _PASSED)


def _always_quantized(value: ir.Value) -> bool:
    """Whether only quantizing nodes read the value."""
    users = [use.node.op_type for use in value.uses()]
    return bool(users) and all(op_type in _QUANTIZE for op_type in users) and not value.is_graph_output()


def _roots(value: ir.Value) -> list[str]:
    """The largest initializer that a constant value is computed from; several if they are equally large."""
    sizes: dict[str, int] = {}
    for origin in origins(value):
        node = origin.producer()
        if origin.name and (node is None or not node.inputs):
            tensor = origin.const_value
            sizes[origin.name] = 0 if tensor is None else tensor.size
    return [name for name, size in sizes.items() if size == max(sizes.values())]


def _known_names(names: Sequence[str], known: Collection[str]) -> list[str]:
    """The known names that these begin with: "conv.weight" for "conv.weight_quantized"."""
    recognized = []
    for name in names:
        starts = [k for k in known if name == k or (name.startswith(k) and not name[len(k)].isalnum())]
        if starts:
            recognized.append(max(starts, key=len))
    return recognized
