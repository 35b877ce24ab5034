"""A publisher's graph brings operators of its own: of ONNX Runtime's extensions, of training, or of a library's domain.

The attacker wants code on the device that nobody reviewed for hostile inputs, or that does more than compute (operators
of vendors load files and call services). What stops it: only standard operators that the CPU build runs are allowed,
and functions that the graph itself defines with nothing else in them; a file that ONNX would read in two ways is
refused, so that what is checked is what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import TensorProto, helper

from archipel.bundle import generate_key
from archipel.errors import UnsafeGraphError
from archipel.lite_runtime import load
from tests.attacks.sandbox_bundles import external, public, signed, upload

Change = Callable[[onnx.ModelProto], None]


def honest() -> onnx.ModelProto:
    return upload(external("t", "weights.safetensors"))


def vendor(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type, model.graph.node[0].domain = "Gelu", "com.microsoft"
    model.opset_import.add(domain="com.microsoft", version=1)


def context(model: onnx.ModelProto) -> None:
    """EPContext names a file that an execution provider loads."""
    model.graph.node[0].op_type, model.graph.node[0].domain = "EPContext", "com.microsoft"
    model.graph.node[0].attribute.add(name="ep_cache_context", s=b"../lib.so", type=3)


def classical(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type, model.graph.node[0].domain = "Normalizer", "ai.onnx.ml"


def not_in_any_runtime(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "ImageDecoder"


def other_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 7


def takes_a_vendors_name(model: onnx.ModelProto) -> None:
    node = helper.make_node("Identity", ["a"], ["b"])
    function = helper.make_function("com.microsoft", "Gelu", ["a"], ["b"], [node], [helper.make_opsetid("", 21)])
    model.functions.append(function)


def forbidden_inside_a_function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Gelu", ["a"], ["b"], domain="com.microsoft")
    model.functions.append(helper.make_function("own", "F", ["a"], ["b"], [node], [helper.make_opsetid("", 21)]))


def circle(model: onnx.ModelProto) -> None:
    for name, other in (("F", "G"), ("G", "F")):
        node = helper.make_node(other, ["a"], ["b"], domain="own")
        model.functions.append(helper.make_function("own", name, ["a"], ["b"], [node], [helper.make_opsetid("", 21)]))


def bomb(model: onnx.ModelProto) -> None:
    """Twenty functions, each calling the next one three times: 3^20 nodes once they are inlined."""
    for number in range(20):
        call = {"op_type": "Identity"} if number == 19 else {"op_type": f"F{number + 1}", "domain": "own"}
        nodes = [
            helper.make_node(call["op_type"], [a], [b], domain=call.get("domain", "")) for a, b in ("ab", "bc", "cd")
        ]
        opsets = [helper.make_opsetid("", 21)]
        model.functions.append(helper.make_function("own", f"F{number}", ["a"], ["d"], nodes, opsets))


def calls_that_overflow_the_stack(model: onnx.ModelProto) -> None:
    """Three thousand functions, each calling the one before; the graph calls every thirtieth: no way is long."""
    for number in range(3000):
        name, domain = (f"F{number - 1}", "own") if number else ("Identity", "")
        call = helper.make_node(name, ["a"], ["b"], domain=domain)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", f"F{number}", ["a"], ["b"], [call], opsets))
        if number % 30 == 0:
            model.graph.node.append(helper.make_node(f"F{number}", ["x"], [f"y{number}"], domain="own"))


def subgraphs_of_functions(model: onnx.ModelProto) -> None:
    """31 functions, each calling the next one within 16 subgraphs: ONNX Runtime took 17 s and 735 MB to load it."""
    value = helper.make_tensor_value_info
    for number in range(31):
        last = number == 30
        nodes = [helper.make_node("Relu" if last else f"F{number + 1}", ["a"], ["r0"], domain=None if last else "own")]
        for depth in range(16):
            branches = {
                "then_branch": helper.make_graph(nodes, "t", [], [value(f"r{depth}", TensorProto.FLOAT, None)]),
                "else_branch": helper.make_graph(nodes[:0], "e", [], [value("a", TensorProto.FLOAT, None)]),
            }
            nodes = [helper.make_node("If", ["c"], [f"r{depth + 1}"], **branches)]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
        yes = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
        model.functions.append(helper.make_function("own", f"F{number}", ["a"], ["r16"], [yes, *nodes], opsets))


def training(model: onnx.ModelProto) -> None:
    model.training_info.add()


def configuration(model: onnx.ModelProto) -> None:
    """ONNX Runtime takes session options from a model's metadata under this key, where an environment variable asks."""
    model.metadata_props.add(key="ort_config", value="{}")


def sparse(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add(dims=[1 << 40])


def larger_than_the_file(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].external_data[1].value = "100000"


def longer_than_its_shape(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].external_data[2].value = "65"


def two_sources(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = bytes(64)


def huge(model: onnx.ModelProto) -> None:
    model.graph.initializer.add(name="h", data_type=TensorProto.FLOAT, dims=[1 << 40])


def misplaced(model: onnx.ModelProto) -> None:
    """Elements across their borders: loops that move whole ones fault."""
    tensor = external("w", "weights.safetensors", 32, TensorProto.FLOAT)
    tensor.dims[:] = [8]
    tensor.external_data[1].value = "1"
    model.graph.initializer.append(tensor)


def huge_in_a_body(model: onnx.ModelProto) -> None:
    tensor = TensorProto(name="h", data_type=TensorProto.FLOAT, dims=[1 << 20, 1 << 20], raw_data=bytes(8))
    body = helper.make_graph([], "body", [], [], [tensor])
    model.graph.node.append(helper.make_node("Loop", ["", ""], [], body=body))


def not_its_bytes(model: onnx.ModelProto) -> None:
    model.graph.initializer.add(name="h", data_type=TensorProto.FLOAT, dims=[3], raw_data=bytes(8))


CHANGES: list[Change] = [
    vendor, context, classical, not_in_any_runtime, other_opset, takes_a_vendors_name, forbidden_inside_a_function,
    circle, bomb, calls_that_overflow_the_stack, subgraphs_of_functions, misplaced, huge_in_a_body, training,
    configuration, sparse, larger_than_the_file, longer_than_its_shape, two_sources, huge, not_its_bytes,
]  # fmt: skip


@pytest.fixture(scope="module")
def key() -> Ed25519PrivateKey:
    return generate_key()


def test_the_honest_graph_runs(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    sums, _ = load(signed(tmp_path / "b", key, honest()), public(key)).analyze(np.zeros(1, np.float32))
    assert sums["u"].shape == (64,)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_refused(tmp_path: Path, key: Ed25519PrivateKey, change: Change) -> None:
    model = honest()
    change(model)
    with pytest.raises(UnsafeGraphError, match="'look'"):
        load(signed(tmp_path / "b", key, model), public(key))
