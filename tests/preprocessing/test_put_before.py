"""Transforms in front of a model: the same answers, its own parameters, clear refusals."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from archipel.errors import PreprocessingError
from archipel.graph import Model, check_model
from archipel.graph.parameters import NAMES_KEY
from archipel.preprocessing import (
    CropOrPad,
    Layout,
    Normalize,
    OneHot,
    RandomMask,
    Raw,
    Resize,
    Scale,
    chain,
    describe,
    put_before,
)
from archipel.training import losses, optimizers, step_graph
from tests.preprocessing.cases import FREE_PICTURES, PICTURES, run

TRANSFORMS = (Resize((6, 6)), Scale(), Normalize((0.5,), (0.25,)), Layout("NHWC", "NCHW"))


def written(text: str, **weights: np.ndarray) -> Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> agraph {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return Model.from_proto(proto, list(weights))


def network(sizes: str = "batch, 3, 6, 6", kind: str = "float") -> Model:
    dtype = np.float32 if kind == "float" else np.float64
    weight = np.random.default_rng(1).normal(size=(3, 4)).astype(dtype)
    body = "<int64[2] axes = {2, 3}> { p = ReduceMean <keepdims = 0> (image, axes) y = MatMul (p, kernel) }"
    return written(f"({kind}[{sizes}] image) => ({kind}[n, 4] y) {body}", kernel=weight)


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("sizes", ["batch, 3, 6, 6", "n, 3, side, side"])
def test_the_model_answers_as_to_prepared_examples(sizes: str, kind: str) -> None:
    model = network(sizes, kind)
    joined = put_before(model, [FREE_PICTURES, *TRANSFORMS])
    check_model(joined.ir)
    assert [(i.name, i.dtype, i.shape) for i in joined.inputs] == [("image", "uint8", FREE_PICTURES.shape)]
    assert joined.parameter_names == model.parameter_names
    floats = "float32" if kind == "float" else "float64"
    prepared = run(chain([FREE_PICTURES, *TRANSFORMS], floats=floats), PICTURES)
    np.testing.assert_allclose(run(joined, PICTURES), run(model, prepared), rtol=1e-6, atol=1e-6)
    # What a file keeps.
    again = Model.from_proto(onnx.load_from_string(joined.to_bytes()))
    assert again.parameter_names == ("kernel",)
    assert [table["kind"] for table in describe(again)] == ["raw", "resize", "scale", "normalize", "layout"]
    assert [info.name for info in model.inputs] == ["image"]
    assert model.inputs[0].dtype == floats


def test_constants_of_transforms_are_no_parameters() -> None:
    """Nor of a model whose file does not list its own."""
    model = network()
    del model.ir.metadata_props[NAMES_KEY]
    assert put_before(model, [FREE_PICTURES, *TRANSFORMS]).parameter_names == ("kernel",)
    many = Normalize((0.1, 0.2, 0.3), (0.2, 0.3, 0.4))
    parts = [FREE_PICTURES, Resize((6, 6)), many, Layout("NHWC", "NCHW")]
    assert put_before(model, parts).parameter_names == ("kernel",)


def test_a_second_chain_goes_in_front_of_the_first() -> None:
    inner = put_before(network(), [Raw("float32", ("batch", 6, 6, 3)), Scale(), Layout("NHWC", "NCHW")])
    outer = put_before(inner, [FREE_PICTURES, Resize((6, 6))])
    both = put_before(network(), [FREE_PICTURES, Resize((6, 6)), Scale(), Layout("NHWC", "NCHW")])
    np.testing.assert_allclose(run(outer, PICTURES), run(both, PICTURES), rtol=1e-6)
    assert [table["kind"] for table in describe(outer)] == ["raw", "resize", "raw", "scale", "layout"]


def test_several_inputs_and_names() -> None:
    body = "{ h = MatMul (words, w) s = ReduceSum <keepdims = 0> (h, axes) y = Add (s, extra) }"
    model = written(
        f"(float[n, length, 5] words, float[n, 4] extra) => (float[n, 4] y) <int64[1] axes = {{1}}> {body}",
        w=np.eye(5, 4, dtype=np.float32),
    )
    tokens = Raw("int32", ("batch", "tokens"), name="tokens")
    joined = put_before(model, [tokens, OneHot(5)])
    assert [(i.name, i.shape) for i in joined.inputs] == [("tokens", ("batch", "tokens")), ("extra", ("batch", 4))]
    ids, extra = np.array([[0, 1, 1], [3, 4, 0]], np.int32), np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(run(joined, ids, extra), [[2, 3, 1, 1], [2, 1, 1, 2]])
    scaled = put_before(model, [Raw("uint8", ("batch", 4), input="extra"), Scale(), tokens, OneHot(5)])
    bytes_ = np.full((2, 4), 255, np.uint8)
    np.testing.assert_array_equal(run(scaled, ids, bytes_), run(joined, ids, extra))
    with pytest.raises(PreprocessingError, match="input 'extra' already"):
        put_before(model, [Raw("int32", ("batch", "tokens"), name="extra"), OneHot(5)])
    with pytest.raises(PreprocessingError, match="input 'x' is given but the model has words, extra"):
        put_before(model, [Raw("uint8", ("batch", 4), input="x")])


def test_steps_train_on_raw_integers() -> None:
    """No gradient flows into the raw input; those of the parameters are the ones behind prepared examples."""
    model, loss, sgd = network(), losses.cross_entropy(), optimizers.sgd(lr=1.0)
    raw = step_graph(put_before(model, [FREE_PICTURES, *TRANSFORMS]), loss, sgd)
    plain = step_graph(model, loss, sgd)
    prepared, label = run(chain([FREE_PICTURES, *TRANSFORMS]), PICTURES), np.array([0, 3, 1])
    kernel, lr = model.parameters["kernel"], np.array(1.0, np.float32)
    assert [info.name for info in raw.inputs] == [info.name for info in plain.inputs]
    np.testing.assert_allclose(
        run(raw, PICTURES, label, kernel, lr), run(plain, prepared, label, kernel, lr), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("transforms", "problem"),
    [
        ([Scale()], "begin with a Raw"),
        ([FREE_PICTURES, Scale()], r"give \[batch, height, width, 3\], but the model takes \[batch, 3, 6, 6\]: axis 1"),
        ([Raw("uint8", ("batch", 6, 6, 3)), Resize((8, 8)), Layout("NHWC", "NCHW")], "axis 2 differs; CropOrPad or"),
        ([Raw("uint8", ("batch", 6, 6)), Scale()], r"\[batch, 6, 6\].*Layout adds"),
        (
            [Raw("uint8", ("batch", 6, 6)), Layout("NHWC", "NCHW")],
            "transform 1 of the input: layout: expected the axes",
        ),
        ([FREE_PICTURES, Normalize((0.0, 1.0), (1.0, 1.0))], "2 means for axis -1"),
        ([FREE_PICTURES, CropOrPad((6, 6), value=-1)], "value -1 is no number of type uint8"),
        ([FREE_PICTURES, RandomMask(1, 2, value=0.5)], "value 0.5 is no number of type uint8"),
        ([FREE_PICTURES, FREE_PICTURES], "2 raw inputs, but the model has 1: image"),
        ([FREE_PICTURES, "scale"], "'scale' is no transform"),
    ],
)
def test_refusals(transforms: list[object], problem: str) -> None:
    with pytest.raises(PreprocessingError, match=problem):
        put_before(network(), transforms)  # type: ignore[arg-type]


def test_programs_are_refused() -> None:
    with pytest.raises(PreprocessingError, match="a program, whose inputs have roles"):
        put_before(step_graph(network(), losses.cross_entropy(), optimizers.sgd()), [FREE_PICTURES])
    fixed = network("2, 3, 6, 6")
    with pytest.raises(PreprocessingError, match="the model has a fixed batch"):
        put_before(fixed, [FREE_PICTURES, *TRANSFORMS])
