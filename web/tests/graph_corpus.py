"""Graphs that a bundle may hold and graphs that it may not, for both implementations of the inspection.

Each is a file of `graphs/`; `graphs.json` says of each whether it passes, and words that the error has. The words are
written by hand, from the rules in docs/device.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, TensorProto, helper, parser

FOLDER = Path(__file__).parent / "graphs"
WEIGHTS_BYTES = 100
WEIGHTS = "weights.safetensors"

Case = tuple[str, bytes, str | None]
"""Name, bytes, what the error says; None where there is none."""


def write(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    index = {}
    for name, data, error in cases():
        (folder / f"{name}.onnx").write_bytes(data)
        index[name] = error
    (folder / "graphs.json").write_text(json.dumps({"weights": WEIGHTS_BYTES, "graphs": index}, indent=1) + "\n")


def cases() -> Iterator[Case]:
    yield from _good()
    yield from ((name, change, error) for name, change, error in _changed())
    yield from _wire()


def model(nodes: str = "y = Relu(x)", functions: str = "", imports: str = '"": 21') -> ModelProto:
    text = f"<ir_version: 10, opset_import: [{imports}]> g (float[n, 3] x) => (float[n, 3] y) {{ {nodes} }} {functions}"
    return parser.parse_model(text)


def external(
    location: str = WEIGHTS, offset: str = "40", length: str = "60", dtype: int = TensorProto.FLOAT, dims: Any = (5, 3)
) -> TensorProto:
    tensor = TensorProto(name="t", data_type=dtype, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _with(tensor: TensorProto, place: str = "initializer") -> bytes:
    made = model()
    match place:
        case "initializer":
            made.graph.initializer.append(tensor)
        case "attribute":
            made.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))
        case "list":
            made.graph.node[0].attribute.append(
                onnx.AttributeProto(name="several", type=onnx.AttributeProto.TENSORS, tensors=[tensor])
            )
        case "subgraph":
            body = helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensor)], "body", [], [])
            inner = helper.make_graph([helper.make_node("If", ["c"], ["d"], then_branch=body)], "inner", [], [])
            made.graph.node.append(helper.make_node("Loop", ["x"], ["e"], body=inner))
        case "function":
            _add_function(made, helper.make_node("Constant", [], ["b"], value=tensor))
        case "default":
            _add_function(made, helper.make_node("Identity", ["a"], ["b"]))
            made.functions[0].attribute_proto.append(helper.make_attribute("value", tensor))
    return made.SerializeToString()


def _add_function(made: ModelProto, node: onnx.NodeProto, name: str = "F", domain: str = "own") -> None:
    opsets = [helper.make_opsetid("", 21)]
    made.functions.append(helper.make_function(domain, name, ["a"], ["b"], [node], opsets))


def _good() -> Iterator[Case]:
    yield "good_relu", model().SerializeToString(), None
    yield "good_empty", b"\x08\x0a\x3a\x00\x42\x02\x10\x15", None
    for place in ("initializer", "attribute", "list", "subgraph", "function", "default"):
        yield f"good_external_{place}", _with(external(), place), None
    called = model(
        "y = own.F(x)", '<domain: "own", opset_import: ["": 21]> F (a) => (b) { b = Relu(a) }', '"": 21, "own": 1'
    )
    yield "good_function", called.SerializeToString(), None
    for name, tensor in {
        "raw": helper.make_tensor("t", TensorProto.FLOAT, [2, 3], bytes(24), raw=True),
        "floats": helper.make_tensor("t", TensorProto.FLOAT, [3], [1.0, 2.0, -3.0]),
        "doubles": helper.make_tensor("t", TensorProto.DOUBLE, [2], [1.0, 2.0]),
        "int64": helper.make_tensor("t", TensorProto.INT64, [4], [-1, 0, 300, 2**63 - 1]),
        "uint64": helper.make_tensor("t", TensorProto.UINT64, [2], [2**64 - 1, 7]),
        "int8": helper.make_tensor("t", TensorProto.INT8, [3], [-128, 0, 127]),
        "int4": helper.make_tensor("t", TensorProto.INT4, [3], bytes(2), raw=True),
        "strings": helper.make_tensor("t", TensorProto.STRING, [2], [b"a", b""]),
        "no_elements": helper.make_tensor("t", TensorProto.FLOAT, [0, 5], []),
        "at_the_end": external(offset="40", length="60"),
        "int4_outside": external(offset="0", length="3", dtype=TensorProto.INT4, dims=[5]),
    }.items():
        yield f"good_tensor_{name}", _with(tensor), None
    made = model()
    made.graph.node[0].attribute.append(onnx.AttributeProto(name="axes", type=onnx.AttributeProto.INTS))
    yield "good_empty_list", made.SerializeToString(), None
    made = model()
    made.metadata_props.add(key="archipel.import", value="{}")
    yield "good_metadata", made.SerializeToString(), None
    made = model()
    made.graph.value_info.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["n"]))
    yield "good_sequence", made.SerializeToString(), None


def _changed() -> Iterator[Case]:
    for name, location in {
        "outside": "../device.key", "absolute": "/etc/passwd", "other": "other.bin", "memory": "*/_ORT_MEM_ADDR_/*",
        "dotted": f"./{WEIGHTS}", "none": "", "manifest": "manifest.json", "below": f"{WEIGHTS}/x",
        "case": WEIGHTS.upper(),
    }.items():  # fmt: skip
        yield f"location_{name}", _with(external(location)), "no other file"
    for place in ("attribute", "list", "subgraph", "function", "default"):
        yield f"location_in_{place}", _with(external("../device.key"), place), "no other file"
    for name, tensor, error in (
        ("beyond", external(offset="41"), "which has 100"),
        ("far_beyond", external(offset="9223372036854775807"), "which has 100"),
        ("too_short", external(length="56"), "need 60"),
        ("negative", external(offset="-4"), "not a number of bytes"),
        ("hexadecimal", external(offset="0x28"), "not a number of bytes"),
        ("leading_zero", external(offset="040"), "not a number of bytes"),
        ("space", external(offset=" 40"), "not a number of bytes"),
        ("misaligned", external(offset="38"), "misaligned"),
        ("strings", external(dtype=TensorProto.STRING), "strings in another file"),
        ("complex", external(dtype=TensorProto.COMPLEX64), "data type 14"),
        ("undefined", external(dtype=0), "data type 0"),
        ("huge", external(dims=[1 << 40]), "not from 0 to"),
        ("huge_product", external(dims=[1 << 20, 1 << 20]), "the limit is"),
        ("negative_size", external(dims=[-1]), "not from 0 to"),
        ("rank", external(dims=[1] * 17), "rank 17"),
    ):
        yield f"external_{name}", _with(tensor), error
    tensor = external()
    del tensor.external_data[2]
    yield "external_no_length", _with(tensor), "external_data has"
    tensor = external()
    tensor.external_data.add(key="location", value=WEIGHTS)
    yield "external_twice", _with(tensor), "each once"
    tensor = external()
    tensor.external_data.add(key="prepacked_MatMul", value="0;1")
    yield "external_prepacked", _with(tensor), "each once"
    tensor = external()
    tensor.raw_data = bytes(60)
    yield "external_and_raw", _with(tensor), "as well"
    tensor = external()
    tensor.data_location = TensorProto.DEFAULT
    yield "external_denied", _with(tensor), "contradict"
    for name, tensor, error in (
        ("raw_short", TensorProto(name="t", data_type=1, dims=[3], raw_data=bytes(8)), "dtype and shape need 12"),
        ("floats_short", TensorProto(name="t", data_type=1, dims=[3], float_data=[1.0]), "dtype and shape need 3"),
        ("ints_long", TensorProto(name="t", data_type=7, dims=[1], int64_data=[1, 2]), "dtype and shape need 1"),
        ("other_field", TensorProto(name="t", data_type=1, dims=[1], int32_data=[1]), "expected float_data"),
        ("two_fields", TensorProto(name="t", data_type=1, dims=[1], float_data=[1.0], raw_data=bytes(4)), "alone"),
        ("raw_strings", TensorProto(name="t", data_type=8, dims=[1], raw_data=bytes(4)), "alone"),
        ("segment", TensorProto(name="t", data_type=1, dims=[1], segment=TensorProto.Segment(begin=0)), "segments"),
    ):
        yield f"tensor_{name}", _with(tensor), error
    yield from _models()


def _models() -> Iterator[Case]:
    def changed(name: str, error: str, change: Any) -> Case:
        made = model()
        change(made)
        return name, made.SerializeToString(), error

    def attribute(**fields: Any) -> Any:
        return lambda m: m.graph.node[0].attribute.append(onnx.AttributeProto(**{"name": "a", **fields}))

    yield changed(
        "operator_unknown", "not a standard operator", lambda m: setattr(m.graph.node[0], "op_type", "Upload")
    )
    yield changed(
        "operator_image", "not a standard operator", lambda m: setattr(m.graph.node[0], "op_type", "ImageDecoder")
    )
    yield changed("operator_old", "not a standard operator", lambda m: setattr(m.graph.node[0], "op_type", "Upsample"))
    yield changed("operator_none", "not a standard operator", lambda m: setattr(m.graph.node[0], "op_type", ""))
    yield changed("operator_overload", "not a standard operator", lambda m: setattr(m.graph.node[0], "overload", "x"))
    for domain in ("com.microsoft", "ai.onnx.ml", "ai.onnx", "own"):
        yield changed(
            f"domain_{domain}", "or a function of the graph", lambda m, d=domain: setattr(m.graph.node[0], "domain", d)
        )
        if domain != "own":
            yield changed(
                f"function_{domain}", "ONNX Runtime's own",
                lambda m, d=domain: _add_function(m, helper.make_node("Relu", ["a"], ["b"]), domain=d),
            )  # fmt: skip
    yield changed(
        "import_microsoft", "has no function", lambda m: m.opset_import.add(domain="com.microsoft", version=1)
    )
    yield changed("import_twice", "twice", lambda m: m.opset_import.add(domain="", version=21))
    yield changed("import_old", "standard opset 20", lambda m: setattr(m.opset_import[0], "version", 20))
    yield changed("import_none", "no standard opset", lambda m: m.ClearField("opset_import"))
    yield changed("ir_version", "IR version 13", lambda m: setattr(m, "ir_version", 13))
    yield changed("no_graph", "holds no graph", lambda m: m.ClearField("graph"))
    yield changed("training", "training information", lambda m: m.training_info.add())
    yield changed("devices", "may not choose devices", lambda m: m.configuration.add(name="x"))
    yield changed("metadata", "may act on others", lambda m: m.metadata_props.add(key="ort_config", value="{}"))
    yield changed("metadata_node", "may act on others", lambda m: m.graph.node[0].metadata_props.add(key="x", value=""))
    yield changed(
        "metadata_value", "may act on others", lambda m: m.graph.input[0].metadata_props.add(key="x", value="")
    )
    yield changed("sparse", "sparse tensors", lambda m: m.graph.sparse_initializer.add(dims=[3]))
    yield changed(
        "quantization", "quantization annotations", lambda m: m.graph.quantization_annotation.add(tensor_name="x")
    )
    yield changed("attribute_no_type", "of type 0", attribute(i=1))
    yield changed("attribute_wrong_type", "is of type 1 (f)", attribute(type=1, i=1))
    yield changed("attribute_no_value", "no value", attribute(type=2))
    yield changed("attribute_two_values", "is of type 2 (i)", attribute(type=2, i=1, s=b"x"))
    yield changed("attribute_sparse", "sparse tensors", attribute(type=11, sparse_tensor=onnx.SparseTensorProto()))
    yield changed("attribute_reference", "outside of one", attribute(type=2, ref_attr_name="b"))
    twice = [onnx.AttributeProto(name="a", type=2, i=1)] * 2
    yield changed("attribute_twice", "same name", lambda m: m.graph.node[0].attribute.extend(twice))
    yield changed("type_map", "maps are not", lambda m: m.graph.input[0].type.map_type.SetInParent())
    relu, own = helper.make_node("Relu", ["a"], ["b"]), helper.make_node("F", ["a"], ["b"], domain="own")
    yield changed("function_twice", "twice", lambda m: (_add_function(m, relu), _add_function(m, relu)))
    yield changed("function_itself", "calls itself", lambda m: _add_function(m, own))
    yield changed("function_no_domain", "ONNX Runtime's own", lambda m: _add_function(m, relu, domain=""))
    circle = [helper.make_node(name, ["a"], ["b"], domain="own") for name in ("G", "F")]
    yield changed("function_circle", "calls itself", lambda m: [_add_function(m, n, x) for n, x in zip(circle, "FG")])
    yield "function_bomb", _chain(20, 3), "more than 500000 nodes"
    yield "function_deep", _chain(40, 1), "more than 32 deep"
    # Each part of the chain is short enough, and known when the next one is looked at.
    parts = ModelProto.FromString(_chain(40, 1))
    parts.functions.reverse()
    yield "function_deep_in_parts", parts.SerializeToString(), "more than 32 deep"
    yield "subgraph_deep", _nested(17), "more than 16 deep"
    yield "good_subgraphs", _nested(16), None
    # Each function and the graph itself go 16 deep or less.
    yield "subgraph_deep_in_functions", _nested(8, _nested(9)), "those of functions included"
    yield "good_subgraphs_in_functions", _nested(8, _nested(8)), None
    yield "type_deep", _sequences(17), "more than 16 deep"


def _chain(length: int, times: int) -> bytes:
    made = model()
    for number in range(length):
        last = number == length - 1
        call = ("Relu", "") if last else (f"F{number + 1}", "own")
        node = helper.make_node(call[0], ["a"], ["b"], domain=call[1])
        _add_function(made, node, f"F{number}")
        made.functions[-1].node.extend([node] * (times - 1))
    return made.SerializeToString()


def _nested(depth: int, function: bytes | None = None) -> bytes:
    """Subgraphs within each other, in the innermost a call of a function with the nodes of another such model."""
    node = helper.make_node("Relu" if function is None else "F", ["a"], ["b"], domain="own" if function else None)
    for _ in range(depth):
        node = helper.make_node("If", ["c"], ["d"], then_branch=helper.make_graph([node], "body", [], []))
    made = model()
    made.graph.node.append(node)
    if function is not None:
        _add_function(made, ModelProto.FromString(function).graph.node[-1])
    return made.SerializeToString()


def _sequences(depth: int) -> bytes:
    made = model()
    kind = made.graph.input[0].type
    kind.Clear()
    for _ in range(depth):
        kind = kind.sequence_type.elem_type
    kind.tensor_type.elem_type = 1
    return made.SerializeToString()


def _wire() -> Iterator[Case]:
    whole = b"\x08\x0a\x3a\x00\x42\x02\x10\x15"
    for name, data, error in (
        ("empty", b"", "IR version"),
        ("unknown_field", whole + b"\xf8\x06\x00", "unknown field number 111"),
        ("field_zero", whole + b"\x00\x00", "unknown field number 0"),
        ("wrong_type", whole + b"\x3d\x00\x00\x00\x00", "wire type 5"),
        ("group", whole + b"\x3b\x3c", "wire type 3"),
        ("twice", whole + b"\x08\x0a", "twice"),
        ("two_graphs", whole + b"\x3a\x00", "twice"),
        ("long_number", b"\x08\x8a\x00" + whole[2:], "longer than it has to be"),
        ("long_tag", b"\x88\x00\x0a" + whole[2:], "longer than it has to be"),
        ("long_length", b"\x08\x0a\x3a\x80\x00\x42\x02\x10\x15", "longer than it has to be"),
        ("endless_number", b"\x08" + b"\xff" * 11, "does not end"),
        ("65_bits", b"\x08" + b"\xff" * 9 + b"\x02", "more than 64 bits"),
        ("cut_tag", whole + b"\x80", "does not end"),
        ("cut_value", whole[:-1], "longer than its message"),
        ("cut_length", whole + b"\x12", "longer than its message"),
        ("too_long", whole + b"\x12\x05a", "longer than its message"),
        ("longest", whole + b"\x12" + b"\xff" * 9 + b"\x01", "longer than its message"),
        ("domain_not_utf8", whole[:4] + b"\x42\x05\x0a\x01\xff\x10\x15", "not UTF-8"),
        ("domain_zero_byte", whole[:4] + b"\x42\x05\x0a\x01\x00\x10\x15", "zero byte"),
        ("text", b"not a graph at all", "not what the converter writes"),
    ):
        yield f"wire_{name}", data, error
    # A packed list that ends inside a number; one whose number is too long.
    for name, packed, error in (("cut", b"\x01\x80", "number"), ("long", b"\x81\x00", "longer than it has to be")):
        tensor = b"\x08\x01\x10\x07\x3a" + bytes([len(packed)]) + packed
        graph = b"\x2a" + bytes([len(tensor)]) + tensor
        yield f"wire_packed_{name}", b"\x08\x0a\x3a" + bytes([len(graph)]) + graph + b"\x42\x02\x10\x15", error


if __name__ == "__main__":
    write()
