"""Find the weights of layers: follow each parameter from its initializer to the operators that multiply with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.errors import CompressionError, GraphError
from archipel.graph import Model
from archipel.graph.parameters import match
from archipel.graph.passes.constants import LAYOUTS
from archipel.graph.shapes import constant_array, dims, is_static, rank, static_size
from archipel.graph.walk import only_use

Axes = tuple[int | None, ...]
"""For each axis of a value the parameter's axis that it is; None if it is none."""

_RECURRENT = ("LSTM", "GRU", "RNN")
# These move elements, and compute nothing.
_LAYOUT = frozenset({"Transpose", "Unsqueeze", "Squeeze", "Slice", "Split", "Concat", "Reshape", "Flatten", "Identity"})


@dataclass(frozen=True)
class Reader:
    """A layer that multiplies with the weight, which is its input `slot`.

    `axis` is the axis of the parameter over which the layer sums (its input channels), `outputs` that of its output
    channels; None where a reshape joins or splits it. `path` are the layout operators between the parameter (or its
    mask) and the layer.
    """

    node: ir.Node
    slot: int
    axis: int | None
    outputs: int | None
    path: tuple[ir.Node, ...]

    def rearrange(self, content: np.ndarray) -> np.ndarray | None:
        """An array of the parameter's shape as the layer reads it; None where the path does more than lay it out."""
        for node in self.path:
            if node.op_type not in LAYOUTS:
                return None
            if node.op_type == "Transpose":
                content = content.transpose(node.attributes.get_ints("perm") or None)
            else:
                shape = dims(node.outputs[0])
                if static_size(shape) != content.size:
                    return None
                content = content.reshape([d for d in shape if isinstance(d, int)])
        return content


@dataclass(frozen=True)
class LayerWeight:
    """A parameter of rank 2 and above that layers multiply with, after multiplying it with its `mask`, if any.

    `alone` says that only these layers read it.
    """

    name: str
    value: ir.Value
    readers: tuple[Reader, ...]
    alone: bool
    mask: Mask | None

    @property
    def content(self) -> np.ndarray:
        content = constant_array(self.value)
        if content is None:
            raise CompressionError(f"parameter {self.name!r} has no value")
        return content

    @property
    def axis(self) -> int | None:
        """The axis of input channels, if all readers agree on it."""
        axes = {reader.axis for reader in self.readers}
        return axes.pop() if len(axes) == 1 else None

    @property
    def kept(self) -> np.ndarray:
        """bool in the shape of the parameter: false where a mask makes it zero."""
        return np.ones(self.content.shape, bool) if self.mask is None else self.mask.kept


@dataclass(frozen=True)
class Mask:
    """`Mul(parameter, mask)`: the node, and the initializer with the mask, bool before a Cast or numbers 0 and 1."""

    node: ir.Node
    stored: ir.Value
    kept: np.ndarray


def layer_weights(model: Model) -> list[LayerWeight]:
    """The weights of Conv, ConvTranspose, Gemm, MatMul, LSTM, GRU and RNN, in the order of the initializers."""
    parameters = set(model.parameter_names)
    weights = []
    for name in model.parameter_names:
        value = model.ir.graph.initializers[name]
        if rank(value) < 2:
            continue
        mask = find_mask(value, parameters)
        source = value if mask is None else mask.node.outputs[0]
        # Followed from behind the mask, so that a masked weight has the same readers.
        ends = list(_readers(source, tuple(range(rank(value))), ()))
        readers = tuple(end for end in ends if end is not None)
        if readers:
            weights.append(LayerWeight(name, value, readers, None not in ends, mask))
    return weights


def choose_weights(weights: Sequence[LayerWeight], part: str, layers: str, exclude: Sequence[str]) -> list[LayerWeight]:
    """The weights whose name matches the glob `layers` and none of `exclude`.

    Raises CompressionError for a glob that matches nothing.
    """
    names = [weight.name for weight in weights]
    if not names:
        raise CompressionError(f"{part}: the model has no weights of Conv, Gemm, MatMul or recurrent layers")
    try:
        left_out = set(match(names, exclude)) if exclude else set()
        wanted = set(match(names, layers)) - left_out
    except GraphError as error:
        raise CompressionError(f"{part}: {error}") from None
    return [weight for weight in weights if weight.name in wanted]


def find_mask(value: ir.Value, parameters: set[str]) -> Mask | None:
    """The mask of an initializer: a product with 0 and 1 that is its only reader."""
    use = only_use(value)
    if use is None or not _is(use[0], "Mul"):
        return None
    product, index = use
    other = product.inputs[1 - index]
    cast = None if other is None else other.producer()
    stored = cast.inputs[0] if cast is not None and _is(cast, "Cast") else other
    # A product with another parameter or of another shape is no mask.
    if stored is None or not stored.is_initializer() or stored.name in parameters or dims(stored) != dims(value):
        return None
    content = constant_array(stored)
    if content is None or not np.isin(content, (0, 1)).all():
        return None
    return Mask(product, stored, content.astype(bool))


def refuse_quantized(model: Model, part: str) -> None:
    """Raise CompressionError for a model whose weights are rounded: parts that change weights come before."""
    rounded = getattr(model, "training_form", None) is not None or any(
        _is(use.node, "QuantizeLinear") and use.idx == 0
        for name in model.parameter_names
        for use in model.ir.graph.initializers[name].uses()
    )
    if rounded:
        raise CompressionError(f"{part}: the model is quantized already; put {part} before quantization in the recipe")


def _readers(value: ir.Value, axes: Axes, path: tuple[ir.Node, ...]) -> Iterator[Reader | None]:
    """The layers behind `value`; None for each other reader."""
    if value.is_graph_output():
        yield None
    for use in value.uses():
        node, slot = use.node, use.idx
        ends = _ends(node, slot, len(axes))
        if ends is not None:
            yield Reader(node, slot, axes[ends[0]], axes[ends[1]], path)
        elif node.domain == "" and node.op_type in _LAYOUT and (slot == 0 or node.op_type == "Concat"):
            for output in node.outputs:
                yield from _readers(output, _axes_behind(node, axes, output), (*path, node))
        else:
            yield None


def _ends(node: ir.Node, slot: int, count: int) -> tuple[int, int] | None:
    """The axes of its input `slot` that a layer sums over, and that has its output channels; None for no weight."""
    if node.domain != "":
        return None
    if node.op_type == "Conv" and slot == 1:
        return 1, 0
    if node.op_type == "ConvTranspose" and slot == 1:
        return 0, 1
    if node.op_type == "Gemm" and slot < 2:
        flipped = bool(node.attributes.get_int("transB" if slot else "transA", 0))
        # The second factor is [summed, out], the first [out, summed]; the transpositions exchange the axes.
        axis = int(flipped == bool(slot))
        return axis, 1 - axis
    if node.op_type == "MatMul" and count >= 2:
        return (count - 2, count - 1) if slot else (count - 1, count - 2)
    if node.op_type in _RECURRENT and slot in (1, 2):
        return 2, 1
    return None


def _axes_behind(node: ir.Node, axes: Axes, output: ir.Value) -> Axes:
    """The axes behind a layout operator."""
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm") or range(len(axes))[::-1]
        return tuple(axes[i] for i in perm)
    if node.op_type in ("Unsqueeze", "Squeeze"):
        named = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
        if named is None:
            return (None,) * rank(output)
        if node.op_type == "Squeeze":
            dropped = {int(i) % len(axes) for i in named}
            return tuple(axis for i, axis in enumerate(axes) if i not in dropped)
        added = {int(i) % rank(output) for i in named}
        rest = iter(axes)
        return tuple(None if i in added else next(rest) for i in range(rank(output)))
    if node.op_type in ("Reshape", "Flatten"):
        return _axes_behind_reshape(node, axes, output)
    return axes


def _axes_behind_reshape(node: ir.Node, axes: Axes, output: ir.Value) -> Axes:
    """An axis that a reshape neither joins nor splits has as many elements behind it as before, and the same size."""
    before = () if node.inputs[0] is None else dims(node.inputs[0])
    after = dims(output)
    if not is_static(before) or not is_static(after):
        return (None,) * len(after)
    places = {
        (size, static_size(before[i + 1 :])): axis for i, (size, axis) in enumerate(zip(before, axes)) if size != 1
    }
    return tuple(places.get((size, static_size(after[i + 1 :]))) for i, size in enumerate(after))


def _is(node: ir.Node, op_type: str) -> bool:
    return node.domain == "" and node.op_type == op_type
