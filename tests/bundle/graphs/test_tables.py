"""The tables that graphs are read by, against the packages that they were taken from."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import onnx
import pytest
from onnx import defs

from archipel.bundle.graphs import onnx_schema, operators
from archipel.bundle.graphs.wire import Table
from archipel.graph.opset import IR_VERSION, OPSET
from tests.operators.kernels import kernels

WEB = Path(__file__).resolve().parents[3] / "web" / "src" / "bundle" / "graphs"
MESSAGES: dict[str, type] = {
    "MODEL": onnx.ModelProto, "OPSET_IMPORT": onnx.OperatorSetIdProto, "ENTRY": onnx.StringStringEntryProto,
    "GRAPH": onnx.GraphProto, "FUNCTION": onnx.FunctionProto, "NODE": onnx.NodeProto, "ATTRIBUTE": onnx.AttributeProto,
    "TENSOR": onnx.TensorProto, "VALUE_INFO": onnx.ValueInfoProto, "TYPE": onnx.TypeProto,
    "TENSOR_TYPE": onnx.TypeProto.Tensor, "SHAPE": onnx.TensorShapeProto, "DIMENSION": onnx.TensorShapeProto.Dimension,
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_of_the_official_messages_is_known(name: str) -> None:
    table: Table = getattr(onnx_schema, name)
    official = {}
    for field in MESSAGES[name].DESCRIPTOR.fields:  # type: ignore[attr-defined]
        packed = getattr(field, "is_packed", False)
        fixed = {field.TYPE_FLOAT: 5, field.TYPE_DOUBLE: 1}.get(field.type, 0)
        lengthy = field.message_type is not None or field.type in (field.TYPE_STRING, field.TYPE_BYTES) or packed
        many = not field.has_presence and not packed
        official[field.number * 8 + (2 if lengthy else fixed)] = (field.name, many)
    assert {tag: (field.name, field.repeated) for tag, field in table.items()} == official


def test_sequences_and_optionals_hold_one_type() -> None:
    for kind in (onnx.TypeProto.Sequence, onnx.TypeProto.Optional):
        assert [(field.number, field.name) for field in kind.DESCRIPTOR.fields] == [(1, "elem_type")]
    assert [(tag, field.name) for tag, field in onnx_schema.ELEMENT_TYPE.items()] == [(10, "elem_type")]


def test_types_and_attributes_have_the_official_numbers() -> None:
    names = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}
    assert {"undefined", "complex64", "complex128"} <= set(names.values()) - {names[n] for n in onnx_schema.DATA_TYPES}
    for number, (bits, typed) in onnx_schema.DATA_TYPES.items():
        found = onnx.helper.tensor_dtype_to_field(number)
        assert typed == found, names[number]
        size = re.search(r"\d+", names[number])
        wanted = {"float": 32, "double": 64, "bool": 8, "string": 0}.get(names[number]) or int(size[0] if size else 0)
        assert bits == wanted, names[number]
    kinds = {number: name.lower() for name, number in onnx.AttributeProto.AttributeType.items()}
    short = {"float": "f", "int": "i", "string": "s", "tensor": "t", "graph": "g", "type_proto": "tp"}
    assert {n: short.get(kinds[n], kinds[n]) for n in onnx_schema.ATTRIBUTE_VALUES} == onnx_schema.ATTRIBUTE_VALUES


def test_operators_are_those_that_the_installed_packages_have() -> None:
    assert (operators.OPSET, operators.IR_VERSION) == (OPSET, IR_VERSION) == (21, 10)
    runs = set()
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= OPSET and schema.name not in runs:
            present = defs.get_schema(schema.name, OPSET, "")
            body = present.has_function or present.has_context_dependent_function
            ranges = [versions for versions, _ in kernels().get(schema.name, ())]
            kernel = any(first <= present.since_version <= last for first, last in ranges)
            if not present.deprecated and (body or kernel or schema.name == "Constant"):
                runs.add(schema.name)
    assert runs == operators.OPERATORS
    assert {"Conv", "LSTM", "Loop", "MatMulInteger", "SoftmaxCrossEntropyLoss"} <= operators.OPERATORS
    assert not {"ImageDecoder", "Upsample", "Scatter", "Attention", "Adagrad"} & operators.OPERATORS


def test_the_browser_has_the_same_tables() -> None:
    text = (WEB / "operators.ts").read_text().partition("new Set(")[2]
    assert set(text.split("`")[1].split()) == operators.OPERATORS
    text = (WEB / "onnx_schema.ts").read_text()
    for name in (*MESSAGES, "ELEMENT_TYPE"):
        found = re.search(rf"export const {name} = table\({{\n(.*?)\n}}\);", text, re.DOTALL)
        assert found is not None
        wires = {"VARINT": 0, "FIXED64": 1, "BYTES": 2, "FIXED32": 5}
        fields = {
            int(number) * 8 + wires[wire]: (field, "MANY" in rest, rest.count(",") > 1)
            for field, number, wire, rest in re.findall(r"^  (\w+): \[(\d+), (\w+)(.*)\],$", found[1], re.MULTILINE)
        }
        table: Table = getattr(onnx_schema, name)
        assert fields == {tag: (field.name, field.repeated, bool(field.refused)) for tag, field in table.items()}, name


def test_nothing_of_it_needs_the_onnx_package() -> None:
    for module in (onnx_schema, operators):
        assert not [value for value in vars(module).values() if isinstance(value, ModuleType)]
