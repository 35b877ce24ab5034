"""Constant folding."""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx_ir as ir

from archipel.graph.passes.base import GraphPass
from archipel.graph.passes.constants import UNPACK, gives_tensors

_HIDDEN = "archipel.hidden"
_MAX_RANK = 64  # a longer vector is no shape, and may be of any length


class FoldConstants(GraphPass):
    """Compute nodes that depend on no input, except those that read an initializer in `keep`, unpack, or are
    `preserved`.

    Initializers in `keep` are parameters, whose content changes in training.
    """

    def __init__(self, keep: Collection[str], preserved: Callable[[ir.Node], bool] = lambda node: False) -> None:
        self._keep = keep
        self._preserved = preserved

    def change(self, model: ir.Model) -> bool:
        from onnxscript.optimizer import fold_constants_ir

        kept = {value for name, value in model.graph.initializers.items() if name in self._keep}
        # onnxscript's folder removes a Dropout in inference mode, which a model needs that will be trained. In a domain
        # that the folder does not know it stays.
        dropouts = [node for node in model.graph.all_nodes() if node.op_type == "Dropout" and node.domain == ""]
        for node in dropouts:
            node.domain = _HIDDEN
        result = fold_constants_ir(
            model,
            onnx_shape_inference=True,
            should_fold=lambda node: (
                # None: the folder decides by its own rules, which never fold a ConstantOfShape.
                False
                if UNPACK in node.metadata_props
                or self._preserved(node)
                or not gives_tensors(node)
                or any(value in kept for value in node.inputs)
                else _makes_shape(node) or None
            ),
        )
        for node in dropouts:
            node.domain = ""
        model.graph.opset_imports.pop(_HIDDEN, None)
        return bool(result.modified)

    def ensures(self, model: ir.Model) -> None:
        if any(node.domain == _HIDDEN for node in model.graph.all_nodes()):
            raise ir.passes.PostconditionError("FoldConstants left a Dropout in the domain where it was hidden")


def _makes_shape(node: ir.Node) -> bool:
    """Whether this is a short vector of equal integers, from which exporters compute targets of Expand."""
    output = node.outputs[0]
    return (
        node.op_type == "ConstantOfShape"
        and output.dtype == ir.DataType.INT64
        and output.shape is not None
        and len(output.shape) == 1
        and isinstance(output.shape[0], int)
        and output.shape[0] <= _MAX_RANK
    )
