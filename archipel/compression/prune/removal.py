"""Remove channels: tensors shrink, and nodes that hold sizes change with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from archipel.compression.prune.cuts import Cuts
from archipel.compression.prune.dependency import Dependencies
from archipel.compression.prune.rules.table import RULES
from archipel.compression.prune.separate import separate_constants, share_again
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.passes import remove_dead_code
from archipel.graph.shapes import constant_array

M = TypeVar("M", bound=Model)


def remove_channels(model: M, drop: Mapping[str, Sequence[int] | np.ndarray]) -> M:
    """A copy of `model` without the units `drop`: names of groups (`channel_groups`) -> which of their units go.

    Every tensor of the group's members loses its indices; sizes that nodes hold (of Reshape, Split, Slice, Expand, the
    number of groups or of hidden units) change. Inputs and outputs keep their shapes. If the units' producers are zero,
    the outputs are the same. Raises CompressionError for unknown groups and units, or if all units of a group would go.
    """
    result = model.copy()
    graph, known = result.ir.graph, parameter_names(result.ir)
    # Before the analysis, as in `channel_groups`: only so do its names and unit numbers mean the same here.
    copies = separate_constants(result.ir)
    dependencies = Dependencies(graph)
    sizes = {group.name: group.size for group in dependencies.groups}
    gone_labels = [np.zeros(0, np.int64)]
    for name, units in drop.items():
        chosen = np.unique(np.asarray(units, np.int64))
        if name not in sizes:
            raise CompressionError(f"no group of channels is called {name!r}; there are: {', '.join(sizes) or 'none'}")
        if len(chosen) and not (chosen[0] >= 0 and chosen[-1] < sizes[name]):
            raise CompressionError(f"{name!r} has the units 0 to {sizes[name] - 1}, got {chosen[0]} to {chosen[-1]}")
        if len(chosen) == sizes[name]:
            raise CompressionError(f"{name!r}: all {sizes[name]} units would go; leave at least one")
        gone_labels.append(dependencies.units[name][chosen])
    # Every slot with the label of a unit goes with it, also those of activations: rules read them for sizes.
    gone = np.isin(dependencies.labels, np.concatenate(gone_labels))
    cuts = Cuts(graph, dependencies.links, dependencies.flow, gone)
    # Nodes first: their rules read the old sizes.
    for node in list(graph):
        rule = RULES.get(node.op_type) if node.domain == "" else None
        if rule is not None and rule.cut is not None:
            rule.cut(node, cuts)
    for value, axes in cuts.changed().items():
        _shrink(value, axes)
    if copies:
        share_again(result.ir, copies)
    remove_dead_code(result.ir)
    # Constants that rules have written are no parameters.
    record_parameters(result.ir, known)
    return result  # type: ignore[return-value]  # a copy has the class of what it copies


def _shrink(value: ir.Value, axes: Mapping[int, np.ndarray]) -> None:
    content = constant_array(value)
    if value.shape is not None:
        sizes = [int(axes[i].sum()) if i in axes and isinstance(d, int) else d for i, d in enumerate(value.shape)]
        value.shape = ir.Shape(sizes)
    if content is None:
        return
    for axis, kept in axes.items():
        content = np.compress(kept, content, axis)
    tensor = ir.tensor(content, name=value.name)
    node = value.producer()
    if node is None:
        value.const_value = tensor
    else:
        # A Constant node has its content in one of several attributes.
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)
        value.const_value = None
