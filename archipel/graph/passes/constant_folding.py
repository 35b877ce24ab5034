"""What no input changes, computed once."""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx_ir as ir

from archipel.graph.passes.base import GraphPass

_HIDDEN = "archipel.hidden"


class FoldConstants(GraphPass):
    """Compute what no input changes, but nothing that reads an initializer in `keep`: those must stay what they are.

    Nodes for which `preserved` is true stay too.
    """

    def __init__(self, keep: Collection[str], preserved: Callable[[ir.Node], bool] = lambda node: False) -> None:
        self._keep = keep
        self._preserved = preserved

    def change(self, model: ir.Model) -> bool:
        from onnxscript.optimizer import fold_constants_ir

        kept = {value for name, value in model.graph.initializers.items() if name in self._keep}
        # The folder takes a Dropout that is off for nothing; for a model that will be trained it is something.
        dropouts = [node for node in model.graph.all_nodes() if node.op_type == "Dropout" and node.domain == ""]
        for node in dropouts:
            node.domain = _HIDDEN
        result = fold_constants_ir(
            model,
            onnx_shape_inference=True,
            should_fold=lambda node: (
                False if self._preserved(node) or any(value in kept for value in node.inputs) else None
            ),
        )
        for node in dropouts:
            node.domain = ""
        model.graph.opset_imports.pop(_HIDDEN, None)
        return bool(result.modified)

    def ensures(self, model: ir.Model) -> None:
        if any(node.domain == _HIDDEN for node in model.graph.all_nodes()):
            raise ir.passes.PostconditionError("FoldConstants left a Dropout in the domain where it was hidden")
