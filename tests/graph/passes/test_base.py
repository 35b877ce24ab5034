"""What passes promise: it is checked, and whoever breaks it is named."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from archipel.errors import GraphError
from archipel.graph import Builder
from archipel.graph.passes import (
    FoldConstants,
    fix_reshape_targets,
    optimize,
    remove_dead_code,
    remove_identities,
    share_subexpressions,
)
from archipel.graph.passes.base import GraphPass, LevelPass, Pipeline
from archipel.graph.passes.inference import PASSES, optimize_for_inference
from archipel.graph.passes.shape_arithmetic import fold_shapes

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
PLAIN = HEADER + "g (float[b, 4] x) => (float[b, 4] y, float[b, 4] z) { y = Exp (x)  z = Neg (y) }"
LOOP = (
    HEADER
    + """g (float[t, 4] x, float[4] h) => (float[4] y) {
    y = Scan <num_scan_inputs = 1, body = step (float[4] c, float[4] i) => (float[4] o) { o = Add (c, i) }> (h, x) }"""
)


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


class _Broken(GraphPass):
    def __init__(self, how: str) -> None:
        self.how = how

    def change(self, model: ir.Model) -> bool:
        graph = model.graph
        if self.how == "renamed output":
            graph.outputs[0].name = "other"
        elif self.how == "turned outputs":
            graph.outputs[:] = list(reversed(graph.outputs))
        elif self.how == "lost output":
            graph.outputs.pop()
        elif self.how == "new input":
            graph.inputs.append(ir.Value(name="more"))
        elif self.how == "another input":
            graph.inputs[0] = ir.Value(name="x")
        return True


@pytest.mark.parametrize("how", ["renamed output", "turned outputs", "lost output", "new input", "another input"])
def test_inputs_and_outputs_stay(how: str) -> None:
    with pytest.raises(ir.passes.PostconditionError, match=r"_Broken changed the inputs or outputs .* x -> y, z"):
        _Broken(how)(parsed(PLAIN))


def test_a_pass_says_whether_it_changed_anything() -> None:
    model = parsed(PLAIN)
    for each in (remove_dead_code, remove_identities, share_subexpressions, fix_reshape_targets, fold_shapes, *PASSES):
        result = each(model)
        assert result.model is model
        assert not result.modified, type(each).__name__
    changed = parsed(HEADER + "g (float[b, 4] x) => (float[b, 4] y) { a = Identity (x)  u = Neg (x)  y = Exp (a) }")
    assert remove_identities(changed).modified
    assert remove_dead_code(changed).modified
    assert [node.op_type for node in changed.graph] == ["Exp"]
    assert not optimize(changed).modified


def test_a_level_pass_sees_bodies_each_by_itself() -> None:
    seen = []

    class _Look(LevelPass):
        def change_level(self, op: Builder) -> bool:
            seen.append([node.op_type for node in op.graph])
            return False

    _Look()(parsed(LOOP))
    assert seen == [["Scan"], ["Add"]]


def test_what_a_pass_raises_comes_out_as_it_is() -> None:
    class _Fails(GraphPass):
        def change(self, model: ir.Model) -> bool:
            raise GraphError("the shape of 'y' is not known")

    with pytest.raises(GraphError, match="the shape of 'y' is not known") as found:
        Pipeline(remove_dead_code, _Fails())(parsed(PLAIN))
    (note,) = found.value.__notes__
    assert "_Fails" in note
    assert "RemoveDeadCode" in note


def test_a_pipeline_for_inlined_models_refuses_functions() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
    g (float[b, 4] x) => (float[b, 4] y) { y = own.Twice (x) }
    <domain: "own", opset_import: ["" : 21]> Twice (a) => (c) { c = Add (a, a) }"""
    model = parsed(text)
    for run in (optimize, lambda model: optimize_for_inference(model, keep=())):
        with pytest.raises(
            ir.passes.PreconditionError, match=r"the functions own\.Twice; call inline_functions before"
        ):
            run(model)
    assert remove_dead_code(model).model is model


def test_folding_puts_dropouts_back() -> None:
    model = parsed(HEADER + "g (float[b, 4] x) => (float[b, 4] y) { a = Dropout (x)  y = Exp (a) }")
    FoldConstants(keep=())(model)
    assert [(node.domain, node.op_type) for node in model.graph] == [("", "Dropout"), ("", "Exp")]
    assert set(model.graph.opset_imports) == {""}


def test_what_a_dead_branch_reads_is_dead() -> None:
    """Nodes of a body use values of the graph around it also after the node with the body has gone."""
    model = parsed(
        HEADER
        + """g (float[4] x, bool c) => (float[4] y, float[4] z) <float[4] w = {1, 2, 3, 4}> {
        y = Neg (x)
        h = Exp (x)
        z = If (c) <
            then_branch = yes () => (float[4] a) { a = Mul (h, w) },
            else_branch = no () => (float[4] b) { b = If (c) <
                then_branch = inner () => (float[4] p) { p = Add (h, w) },
                else_branch = other () => (float[4] q) { q = Sub (h, w) }
            > }
        >
    }"""
    )
    model.graph.outputs.pop()
    assert remove_dead_code(model).modified
    assert [node.op_type for node in model.graph] == ["Neg"]
    assert not model.graph.initializers
