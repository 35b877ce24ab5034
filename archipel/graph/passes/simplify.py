"""Constants and shape arithmetic, computed once. Each pass changes the model it is given."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.cleanup import remove_dead_code
from archipel.graph.shapes import constant_array, dims

_HIDDEN = "archipel.hidden"


def fold_constants(
    model: ir.Model, keep: Collection[str], preserved: Callable[[ir.Node], bool] = lambda node: False
) -> None:
    """Compute what no input changes, but nothing that reads an initializer in `keep`: those must stay what they are.

    Nodes for which `preserved` is true stay too.
    """
    from onnxscript.optimizer import fold_constants_ir

    kept = {value for name, value in model.graph.initializers.items() if name in keep}
    # The folder takes a Dropout that is off for nothing; for a model that will be trained it is something.
    dropouts = [node for node in model.graph.all_nodes() if node.op_type == "Dropout" and node.domain == ""]
    for node in dropouts:
        node.domain = _HIDDEN
    fold_constants_ir(
        model,
        onnx_shape_inference=True,
        should_fold=lambda node: False if preserved(node) or any(value in kept for value in node.inputs) else None,
    )
    for node in dropouts:
        node.domain = ""
    model.graph.opset_imports.pop(_HIDDEN, None)


def fix_reshape_targets(model: ir.Model) -> None:
    """Give Reshape a constant target, -1 for the one symbolic dimension, where its output shape is known that far."""
    op = Builder(model.graph)
    for node in list(model.graph):
        if node.op_type != "Reshape" or node.domain != "" or constant_array(node.inputs[1]) is not None:
            continue
        if node.outputs[0].shape is None:
            continue
        shape = dims(node.outputs[0])
        symbolic = sum(not isinstance(d, int) for d in shape)
        if symbolic > 1 or 0 in shape:
            continue
        target = np.array([d if isinstance(d, int) else -1 for d in shape], np.int64)
        node.replace_input_with(1, op.constant(target))
        node.attributes.pop("allowzero", None)


def simplify(model: ir.Model, keep: Collection[str]) -> None:
    """What an import runs: shape arithmetic folded, dead code gone, parameters untouched."""
    fold_constants(model, keep)
    fix_reshape_targets(model)
    remove_dead_code(model)
