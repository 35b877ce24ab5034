"""Walking over graphs, with what it must find written by hand."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from archipel.graph import walk

# a = -x; the If reads c, captures a in its branches (in the second one through the If inside that), and w, v.
TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2] x, bool c, bool d) => (float[2] y, float[2] free) <float[2] w = {1, 2}, float[2] v = {3, 4}> {
    a = Neg (x)
    b = If (c) <
        then_branch = then () => (float[2] t) { p = Mul (a, w)  t = Exp (p) },
        else_branch = otherwise () => (float[2] e) {
            q = Abs (v)
            e = If (d) <
                then_branch = deep () => (float[2] m) { m = Add (a, q) },
                else_branch = deeper () => (float[2] n) { n = Identity (q) }
            >
        }
    >
    s = Shape (b)
    y = Reshape (b, s)
    k = Sqrt (w)
    free = Mul (k, k)
}"""


def parsed() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


@pytest.fixture
def graph() -> ir.Graph:
    return ir.from_proto(parsed()).graph


def node(graph: ir.Graph, output: str) -> ir.Node:
    return next(node for node in graph.all_nodes() if node.outputs[0].name == output)


def value(graph: ir.Graph, name: str) -> ir.Value:
    found = [v for level in walk.levels(graph) for v in walk.values(level) if v.name == name]
    return found[0]


def names(values: object) -> list[str | None]:
    return [value.name for value in values]  # type: ignore[attr-defined]


def test_bodies_and_levels(graph: ir.Graph) -> None:
    assert names(walk.bodies(node(graph, "b"))) == ["then", "otherwise"]
    assert names(walk.bodies(node(graph, "e"))) == ["deep", "deeper"]
    assert walk.bodies(node(graph, "a")) == []
    assert names(walk.levels(graph)) == ["g", "then", "otherwise", "deep", "deeper"]


def test_a_list_of_graphs_is_several_bodies() -> None:
    inner = [ir.Graph([], [], nodes=[], name=name) for name in ("one", "two")]
    several = ir.Node("own", "Several", [], [ir.AttrGraphs("bodies", inner)], num_outputs=1)
    assert names(walk.bodies(several)) == ["one", "two"]


def test_inner_nodes_are_those_of_bodies_alone(graph: ir.Graph) -> None:
    assert [node.outputs[0].name for node in walk.inner_nodes(graph)] == ["p", "t", "q", "e", "m", "n"]


def test_values_are_of_one_level(graph: ir.Graph) -> None:
    assert names(walk.values(graph)) == ["x", "c", "d", "w", "v", "a", "b", "s", "y", "k", "free"]
    assert names(walk.values(walk.bodies(node(graph, "b"))[1])) == ["q", "e"]


def test_dependencies_have_what_bodies_capture(graph: ir.Graph) -> None:
    assert names(walk.dependencies(node(graph, "a"))) == ["x"]
    assert names(walk.dependencies(node(graph, "b"))) == ["c", "a", "w", "v", "d", "a"]
    assert names(walk.dependencies(node(graph, "e"))) == ["d", "a", "q", "q"]
    assert names(walk.dependencies(node(graph, "free"))) == ["k", "k"]
    assert names(walk.captured_values(walk.bodies(node(graph, "b"))[1])) == ["v", "d", "a"]


def test_a_body_whose_output_is_a_value_outside_captures_it() -> None:
    outside = ir.Value(name="outside")
    assert walk.captured_values(ir.Graph([], [outside], nodes=[], name="bare")) == [outside]


def test_an_input_left_out_is_no_dependency() -> None:
    x = ir.Value(name="x")
    assert walk.dependencies(ir.Node("", "Clip", [x, None, None])) == [x]


def test_forwards(graph: ir.Graph) -> None:
    def from_(*sources: str) -> tuple[list[str | None], set[str | None]]:
        given = [value(graph, name) for name in sources]
        found = [node.outputs[0].name for node in walk.dependents(graph, given)]
        return found, set(names(walk.descendants(graph, given)))

    assert from_("x") == (["a", "b", "s", "y"], {"x", "a", "b", "s", "y"})
    assert from_("w") == (["b", "s", "y", "k", "free"], {"w", "b", "s", "y", "k", "free"})
    assert from_("v") == (["b", "s", "y"], {"v", "b", "s", "y"})
    assert from_("k", "a") == (["b", "s", "y", "free"], {"k", "a", "b", "s", "y", "free"})
    assert from_("y") == ([], {"y"})


def test_backwards(graph: ir.Graph) -> None:
    def to(*targets: str) -> set[str | None]:
        return set(names(walk.ancestors(graph, [value(graph, name) for name in targets])))

    assert to("free") == {"free", "k", "w"}
    assert to("y") == {"y", "b", "s", "c", "d", "a", "x", "w", "v"}
    assert to("a", "free") == {"a", "x", "free", "k", "w"}


def test_computable_values_of_what_is_given_alone(graph: ir.Graph) -> None:
    def of(*given: str) -> set[str | None]:
        return set(names(walk.computable_values(graph, [value(graph, name) for name in given])))

    assert of("w", "v") == {"w", "v", "k", "free"}
    assert of("x", "c", "d") == {"x", "c", "d", "a"}
    assert of("a", "c", "d", "w", "v") == {"a", "c", "d", "w", "v", "b", "s", "y", "k", "free"}
    without = (node for node in graph if node.op_type != "Sqrt")
    assert set(names(walk.computable_values(without, graph.initializers.values()))) == {"w", "v"}


def test_last_readers(graph: ir.Graph) -> None:
    found = {value.name: node.outputs[0].name for value, node in walk.last_readers(graph).items()}
    assert found == {"x": "a", "c": "b", "d": "b", "a": "b", "v": "b", "b": "y", "s": "y", "w": "k", "k": "free"}


def test_origins(graph: ir.Graph) -> None:
    assert names(walk.origins(value(graph, "free"))) == ["free", "k", "w"]
    found = names(walk.origins(value(graph, "y")))
    assert found[0] == "y"
    assert sorted(map(str, found)) == ["a", "b", "c", "d", "s", "v", "w", "x", "y"]
    assert names(walk.origins(value(graph, "x"))) == ["x"]


CHAIN = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2, 3] x) => (float[3, 2] y, float[2, 3] z) <int64[2] s = {3, 2}> {
    a = Neg (x)  b = Identity (a)  c = Transpose (b)  d = Reshape (c, s)  y = Exp (d)  z = Add (x, b) }"""


def test_along_a_chain() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(CHAIN)).graph

    def back(name: str, *op_types: str) -> str | None:
        return walk.trace_back(value(graph, name), op_types).name

    assert (back("d", "Reshape", "Transpose"), back("d", "Reshape", "Transpose", "Identity")) == ("b", "a")
    assert (back("d", "Transpose"), back("x", "Neg"), back("a", "Neg")) == ("d", "x", "x")

    def moves(node: ir.Node) -> bool:
        return node.op_type in ("Identity", "Transpose", "Reshape")

    found = walk.final_readers(value(graph, "a"), moves)
    assert sorted((str(node.outputs[0].name), index) for node, index in found) == [("y", 0), ("z", 1)]
    # As its second input a Reshape hands nothing on.
    assert [(node.outputs[0].name, index) for node, index in walk.final_readers(value(graph, "s"), moves)] == [("d", 1)]


def test_the_only_reader() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(CHAIN)).graph
    assert walk.only_use(value(graph, "s")) == (node(graph, "d"), 1)
    assert walk.only_reader(value(graph, "c")) is node(graph, "d")
    assert walk.only_use(value(graph, "b")) is None  # two read it
    assert walk.only_reader(value(graph, "y")) is None  # an output, which no node reads
    graph.outputs.append(value(graph, "c"))
    assert walk.only_reader(value(graph, "c")) is None


def test_protobufs() -> None:
    proto = parsed().graph
    assert [list(node.output) for node in walk.proto_nodes(proto.node)] == [
        ["a"], ["b"], ["p"], ["t"], ["q"], ["e"], ["m"], ["n"], ["s"], ["y"], ["k"], ["free"],
    ]  # fmt: skip
    assert names(walk.proto_bodies(proto.node[1])) == ["then", "otherwise"]
    assert walk.proto_bodies(proto.node[0]) == []
    several = onnx.NodeProto(attribute=[onnx.AttributeProto(graphs=[onnx.GraphProto(name=n) for n in ("one", "two")])])
    assert names(walk.proto_bodies(several)) == ["one", "two"]
