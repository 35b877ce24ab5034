"""Is a graph one that any ONNX runtime opens?"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import defs

from archipel.errors import GraphError
from archipel.graph.opset import OPSET


def check_model(model: ir.Model) -> None:
    """Raise GraphError unless every node is a standard operator of the internal opset and the whole is valid ONNX."""
    for node in model.graph.all_nodes():
        if node.domain != "":
            raise GraphError(
                f"{node.op_type} {node.name!r} is of domain {node.domain!r}; only standard operators are allowed"
            )
        try:
            schema = defs.get_schema(node.op_type, OPSET, "")
        except defs.SchemaError:
            raise GraphError(f"{node.op_type} {node.name!r} does not exist in opset {OPSET}") from None
        if schema.deprecated:
            raise GraphError(f"{node.op_type} {node.name!r} is deprecated in opset {OPSET}")
    try:
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(f"not valid ONNX: {error}") from error
