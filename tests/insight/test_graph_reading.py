"""Graphs as data for the page: counts by the onnx package, memory by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from archipel.bundle import Bundle
from archipel.insight import read_bundle, read_onnx
from archipel.insight.page_data import GraphData

Write = Callable[..., Path]


def paths(graph: GraphData) -> list[str]:
    """The path of each node's scope."""
    found = []
    for node in graph.nodes:
        names, scope = [], node.scope
        while scope:
            names.append(graph.scopes[scope].name)
            scope = graph.scopes[scope].parent
        found.append("/".join(reversed(names)))
    return found


def count(graph: onnx.GraphProto) -> int:
    inner = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return len(graph.node) + sum(map(count, inner))


def test_every_program_of_a_bundle_has_the_nodes_of_its_file(cnn: Bundle) -> None:
    opened = read_bundle(cnn, "cnn")
    assert [graph.name for graph in opened.subject.graphs][:3] == ["predict", "train", "train_8"]
    assert {graph.name for graph in opened.subject.graphs} == set(cnn.manifest.programs)
    for graph in opened.subject.graphs:
        proto = onnx.load(cnn.program_path(graph.name), load_external_data=False)
        assert len(graph.nodes) == count(proto.graph)
        assert [graph.values[at].name for at in graph.inputs] == [value.name for value in proto.graph.input]
        assert graph.notes == []


def test_the_statistics_of_weights_are_in_the_graph(cnn: Bundle) -> None:
    [predict] = read_bundle(cnn, "cnn", programs=["predict"]).subject.graphs
    weight = next(value for value in predict.values if value.name == "0.weight")
    numbers = cnn.tensors["0.weight"].astype(np.float64)
    assert weight.kind == "weight"
    assert weight.bytes == numbers.size * 4
    assert weight.statistics is not None
    assert weight.statistics.mean == pytest.approx(numbers.mean(), rel=1e-9)
    assert weight.statistics.counts == np.histogram(numbers, len(weight.statistics.counts))[0].tolist()
    # A program that trains has the same as an input.
    train = next(graph for graph in read_bundle(cnn, "cnn").subject.graphs if graph.name == "train")
    given = next(value for value in train.values if value.name == "0.weight")
    assert (given.role, given.statistics) == ("parameter", weight.statistics)


def test_memory_by_hand(written: Write) -> None:
    path = written(
        """f (float[batch, 8] x) => (float[batch, 4] y, float[batch, 8] c)
        <float[8, 4] w = {WEIGHTS}> {
            [a] a = Relu (x)
            [b] b = Neg (a)
            [c] c = Add (a, b)
            [y] y = MatMul (b, w)
        }""".replace("WEIGHTS", ", ".join(["1"] * 32))
    )
    [graph] = read_onnx(path, batch=3).subject.graphs
    assert graph.memory is not None
    # ONNX Runtime begins with the last node that nobody reads. Each value of 3 x 8 has 96 bytes, y of 3 x 4 has 48.
    # a: 96; b: a and b; y: a, b and y; c: all, as the output y stays.
    order = [graph.nodes[step.node].name for step in graph.memory.steps]
    assert order == ["a", "b", "y", "c"]
    assert [step.bytes for step in graph.memory.steps] == [96, 192, 240, 336]
    assert (graph.memory.peak, graph.memory.peak_step) == (336, 3)
    assert {graph.values[at].name: size for at, size in graph.memory.alive} == {"a": 96, "b": 96, "y": 48, "c": 96}
    assert (graph.memory.inputs, graph.memory.weights) == (96, 128)


def test_scopes_by_names_and_by_weights(written: Write) -> None:
    path = written(
        """f (float[4] x) => (float[4] y)
        <float[4] layer.0.fc.weight = {1, 2, 3, 4}> {
            [a] a = Mul (x, layer.0.fc.weight)
            [b] b = Relu (a)
            [c] y = Neg (b)
        }""".replace("layer.0.fc.weight", "layer__weight")
    )
    proto = onnx.load(path)
    for part in (proto.graph.initializer[0], proto.graph.node[0]):
        if isinstance(part, onnx.TensorProto):
            part.name = "layer.0.fc.weight"
        else:
            part.input[1] = "layer.0.fc.weight"
    onnx.save(proto, path)
    [graph] = read_onnx(path).subject.graphs
    # Relu is where what it reads was made, and so is Neg.
    assert paths(graph) == ["layer/0", "layer/0", "layer/0"]
    proto.graph.node[1].name = "/head/out/relu"
    onnx.save(proto, path)
    assert paths(read_onnx(path).subject.graphs[0]) == ["layer/0", "head/out", ""]


def test_the_notes_of_pytorch_say_where_a_node_is(written: Write) -> None:
    """As its exporter writes them: names of modules from the outermost, which has none, and the node's own."""
    notes = {
        "size": "['_empty_nn_module_stack_from_metadata_hook', 'size']",
        "a": "['', 'front', 'front.0', 'conv']",
        "turn": "['', 'turn']",
        "h": "['', 'rnn', 'gru']",
        "end": "nothing",
    }
    path = written(
        """f (float[4] x) => (float[4] y) {
            [size] s = Exp (x)
            [a] a = Exp (s)
            [turn] t = Neg (a)
            [h] h = Exp (t)
            [end] y = Neg (h)
        }"""
    )
    proto = onnx.load(path)
    for node in proto.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=notes[node.name])
    onnx.save(proto, path)
    assert paths(read_onnx(path).subject.graphs[0]) == ["", "front/0", "", "rnn", "rnn"]


def test_a_node_with_weights_that_have_lost_their_names_is_in_no_other_module(written: Write) -> None:
    path = written(
        """f (float[2, 2] x) => (float[2, 2] y)
        <float[2, 2] w1 = {1, 2, 3, 4}, float[2, 2] w2 = {1, 2, 3, 4}, float[2, 2] w3 = {1, 2, 3, 4}> {
            [a] a = MatMul (x, w1)
            [b] b = Relu (a)
            [lost] c = MatMul (b, w2)
            [d] d = Relu (c)
            [e] y = MatMul (d, w3)
        }"""
    )
    names = {"w1": "body.front.fc.weight", "w2": "w2_computed", "w3": "body.back.fc.weight"}
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        tensor.name = names[tensor.name]
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    onnx.save(proto, path)
    found = paths(read_onnx(path).subject.graphs[0])
    assert found == ["body/front", "body/front", "body", "body", "body/back"]


def test_bodies_are_scopes_and_their_values_are_joined(written: Write) -> None:
    path = written(
        """f (float[4] x, bool c) => (float[4] y) {
            [h] h = Exp (x)
            [choose] r = If (c) <then_branch = t () => (float[4] p) { [inner] p = Exp (h) },
                                 else_branch = e () => (float[4] z) { [other] z = Neg (h) }>
            [end] y = Neg (r)
        }"""
    )
    [graph] = read_onnx(path).subject.graphs
    place = {node.name: at for at, node in enumerate(graph.nodes)}
    assert len(graph.nodes) == 5
    assert dict(zip((node.name for node in graph.nodes), paths(graph))) == {
        "h": "", "inner": "choose/body 1", "other": "choose/body 2", "choose": "choose", "end": "",
    }  # fmt: skip
    made = graph.values[graph.nodes[place["inner"]].inputs[0]]
    assert made.producer == place["h"]
    fed = {graph.values[at].producer for at in graph.nodes[place["choose"]].feeds}
    assert fed == {place["inner"], place["other"]}
