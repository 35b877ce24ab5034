"""The ONNX package's node tests of control flow, sequences and optionals, with tensors as inputs and outputs.

A model's own inputs and outputs are tensors; inside, sequences and optionals are allowed. So a case whose inputs are
sequences gets their items as inputs, and makes the sequences of them; of an output that is one it gives items and
length. Each case is imported, checked as a device checks it, run in ONNX Runtime, and compared with what the package
declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
from backend_cases import Result, node_tests
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.test_case import TestCase

from archipel import Model
from archipel.bundle.graphs import inspect_graph
from archipel.errors import GraphError, ModelImportError
from archipel.graph import check_model
from archipel.graph.slim import slim

_FAMILIES = ("Sequence", "Optional")
_BODIES_OF = ("test_affine_grid", "test_linear_attention", "test_center_crop_pad")
_NAMED = {"If", "Loop", "Scan", "ConcatFromSequence", "SplitToSequence"}


def sequence_cases() -> Iterator[TestCase]:
    """The cases, without those in bfloat16, which NumPy lacks, and those that are bodies of other operators."""
    for case in node_tests():
        named = any(node.op_type.startswith(_FAMILIES) or node.op_type in _NAMED for node in case.model.graph.node)
        if named and not case.name.startswith(_BODIES_OF) and "bfloat16" not in case.name:
            yield case


def family(case: TestCase) -> str:
    """The operator that the case is about."""
    if "sequence_map" in case.name:
        return "SequenceMap"
    if "range" in case.name:
        return "Range, as a Loop"
    return next(node.op_type for node in case.model.graph.node if node.op_type != "Constant")


@cache
def sequence_results() -> tuple[Result, ...]:
    """What becomes of each case; computed once."""
    return tuple(map(check_sequences, sequence_cases()))


def check_sequences(case: TestCase) -> Result:
    """What becomes of one case."""
    given, expected = case.data_sets[0]
    try:
        proto, feed = with_tensors(case.model, given, expected)
        model = Model.from_proto(proto)
        check_model(model.ir)
    except (ModelImportError, GraphError) as error:
        return Result(case.name, family(case), "refused", " ".join(str(error).split())[:200])
    inspect_graph("predict", slim(model.ir).SerializeToString(), ("weights.safetensors", 0))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    found = onnxruntime.InferenceSession(model.to_bytes(), options).run(None, feed)
    wanted = [array for value in expected for array in _flat(value)]
    if len(found) != len(wanted):
        return Result(case.name, family(case), "failed", f"{len(found)} outputs, {len(wanted)} are declared")
    for ours, theirs in zip(found, wanted):
        if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
            return Result(case.name, family(case), "failed", "gives something else than the package declares")
    return Result(case.name, family(case), "passed")


def with_tensors(
    model: onnx.ModelProto, given: Sequence[Any], expected: Sequence[Any]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model with tensors for sequences and optionals at its border, and the arrays for its inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    inputs, outputs, nodes = list(graph.input), list(graph.output), list(graph.node)
    del graph.input[:], graph.output[:], graph.node[:]
    feed: dict[str, np.ndarray] = {}
    for port, value in zip(inputs, given):
        graph.node.extend(_made(graph, port.type, value, port.name, feed))
    graph.node.extend(nodes)
    for port, value in zip(outputs, expected):
        graph.node.extend(_taken(graph, port.type, value, port.name))
    return copy, feed


def _made(
    graph: onnx.GraphProto,
    kind: onnx.TypeProto,
    value: Any,
    name: str,
    feed: dict[str, np.ndarray],
) -> list[onnx.NodeProto]:
    """The nodes that make `name` of inputs with these contents."""
    if kind.WhichOneof("value") == "tensor_type":
        array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
        feed[name] = array
        shape = kind.tensor_type.shape.dim
        sizes = [dim.dim_value if dim.HasField("dim_value") else size for dim, size in zip(shape, array.shape)]
        declared = sizes if kind.tensor_type.HasField("shape") else list(array.shape)
        graph.input.append(helper.make_tensor_value_info(name, kind.tensor_type.elem_type, declared))
        return []
    if kind.WhichOneof("value") == "optional_type":
        inner = kind.optional_type.elem_type
        if value is None:
            return [helper.make_node("Optional", [], [name], type=inner)]
        return [
            *_made(graph, inner, value, f"{name}.element", feed),
            helper.make_node("Optional", [f"{name}.element"], [name]),
        ]
    element = kind.sequence_type.elem_type
    if not len(value):
        return [helper.make_node("SequenceEmpty", [], [name], dtype=element.tensor_type.elem_type)]
    items = [f"{name}.{place}" for place in range(len(value))]
    for item, content in zip(items, value):
        _made(graph, element, content, item, feed)
    return [helper.make_node("SequenceConstruct", items, [name])]


def _taken(graph: onnx.GraphProto, kind: onnx.TypeProto, value: Any, name: str) -> list[onnx.NodeProto]:
    """The nodes that give the contents of `name` as outputs."""
    if kind.WhichOneof("value") == "tensor_type":
        port = graph.output.add()
        port.name = name
        port.type.CopyFrom(kind)
        return []
    if kind.WhichOneof("value") == "optional_type":
        inner = kind.optional_type.elem_type
        return [
            helper.make_node("OptionalGetElement", [name], [f"{name}.got"]),
            *_taken(graph, inner, value, f"{name}.got"),
        ]
    element = kind.sequence_type.elem_type.tensor_type.elem_type
    nodes = [helper.make_node("SequenceLength", [name], [f"{name}.length"])]
    for place, content in enumerate(value):
        at = helper.make_attribute("value", numpy_helper.from_array(np.array(place, np.int64)))
        nodes += [
            helper.make_node("Constant", [], [f"{name}.place.{place}"]),
            helper.make_node("SequenceAt", [name, f"{name}.place.{place}"], [f"{name}.item.{place}"]),
        ]
        nodes[-2].attribute.append(at)
        graph.output.append(helper.make_tensor_value_info(f"{name}.item.{place}", element, list(np.shape(content))))
    graph.output.append(helper.make_tensor_value_info(f"{name}.length", TensorProto.INT64, []))
    return nodes


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, TensorProto):
        return [numpy_helper.to_array(value)]
    if isinstance(value, list):
        return [*(np.asarray(item) for item in value), np.array(len(value))]
    return [np.asarray(value)]
