"""Model.from_onnx: what other tools leave in a file is cleaned up, compared with the file, and reported."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch.nn import functional

from archipel import Model, autodiff
from archipel.errors import ModelImportError
from archipel.graph import check_model
from archipel.graph.importing import onnx_import

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "onnx_models"
HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
RNG = np.random.default_rng(0)


def saved(folder: Path, text: str, **weights: np.ndarray) -> Path:
    proto = onnx.parser.parse_model(text if text.startswith("<") else HEAD + text)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def run(model: Model | Path, **feed: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    data = model.to_bytes() if isinstance(model, Model) else str(model)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, feed)


def operators(model: Model) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.ir.graph))


# README of the data: parameters without the shape tensors and counters that are among the initializers.
PARAMETERS = {"opt_mnist": 5994, "cifar10_cnn_winml": 50182, "ultraface_rfb_320": 281100}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.sampled(every=4)
def test_real_models_match_their_references(name: str) -> None:
    if not DATA.is_dir():
        assert os.environ.get("CI") != "true", f"{DATA} is needed in CI"
        pytest.skip(f"{DATA} is absent")
    model = Model.from_onnx(DATA / f"{name}.onnx")
    check_model(model.ir)
    with np.load(DATA / f"{name}.ref.npz") as file:
        known = dict(file)
    found = run(model, **{port.name: known[f"in:{port.name}"] for port in model.inputs})
    for port, value in zip(model.outputs, found, strict=True):
        expected = known[f"out:{port.name}"]
        assert value.shape == expected.shape  # 32 pictures at once, where the file takes one
        assert np.abs(value - expected).max() <= 1e-4 * np.abs(expected).max()
        assert not isinstance(port.shape[0], int)
    assert sum(value.size for value in model.parameters.values()) == PARAMETERS[name]
    assert not {"Shape", "Gather", "Unsqueeze", "Identity"} & set(operators(model))
    report = model.import_report
    assert report is not None
    assert report.deviation is not None
    assert report.deviation <= 1e-4
    assert report.samples == 3


def test_weights_behind_reshapes_keep_the_shapes_of_the_file(tmp_path: Path) -> None:
    """As CNTK and TensorFlow exports have them: Reshape, Transpose, Identity and Constant between weight and layer."""
    kernel, bias = floats(3, 3, 1, 2), floats(2)
    path = saved(
        tmp_path,
        """g (float[n, 1, 5, 5] x) => (float[n, 4] y) <int64[2] t = {0, -1}, int64[4] k = {2, 1, 3, 3}> {
            i = Identity (kernel)  o = Transpose <perm = [3, 2, 0, 1]> (i)  r = Reshape (o, k)
            c = Conv (x, r)  b = Unsqueeze (bias, axes)  d = Add (c, b)  f = Reshape (d, t)
            w = Constant <value = float[18, 4] {0}> ()  y = MatMul (f, w)
        }""".replace("{0}", "{" + ",".join(map(str, range(72))) + "}"),
        kernel=kernel,
        bias=bias,
        axes=np.array([1, 2]),
    )
    model = Model.from_onnx(path)
    # The Reshape of the kernel changes nothing, and goes.
    assert operators(model) == {"Transpose": 1, "Conv": 1, "Unsqueeze": 1, "Add": 1, "Reshape": 1, "MatMul": 1}
    parameters = model.parameters
    assert set(parameters) == {"kernel", "bias", "w"}
    np.testing.assert_array_equal(parameters["kernel"], kernel)
    np.testing.assert_array_equal(parameters["bias"], bias)
    np.testing.assert_array_equal(parameters["w"], np.arange(72).reshape(18, 4))
    x = floats(2, 1, 5, 5)
    np.testing.assert_allclose(run(model, x=x)[0], run(path, x=x)[0], rtol=1e-5, atol=1e-5)


def test_gradients_have_the_shapes_of_the_file(tmp_path: Path) -> None:
    """A Linear weight [3, 8], a PReLU slope [4] and a kernel in TensorFlow's layout; the numbers are PyTorch's."""
    weight, slope, kernel = floats(3, 16), floats(4), floats(2, 2, 1, 4)
    path = saved(
        tmp_path,
        """g (float[n, 1, 3, 3] x) => (float loss) <int64[2] f = {0, -1}> {
            k = Transpose <perm = [3, 2, 0, 1]> (kernel)  c = Conv (x, k)  s = Unsqueeze (slope, axes)  p = PRelu (c, s)
            r = Reshape (p, f)  t = Transpose (weight)  m = MatMul (r, t)  q = Mul (m, m)
            loss = ReduceMean <keepdims = 0> (q)
        }""",
        weight=weight,
        slope=slope,
        kernel=kernel,
        axes=np.array([1, 2]),
    )
    model = Model.from_onnx(path)
    shapes = {name: value.shape for name, value in model.parameters.items()}
    assert shapes == {"weight": (3, 16), "slope": (4,), "kernel": (2, 2, 1, 4)}
    x = floats(5, 1, 3, 3)
    names = ["weight", "slope", "kernel"]
    _, *found = run(autodiff.gradient(model, of="loss", wrt=names), x=x)
    w, s, k = (torch.from_numpy(array).requires_grad_() for array in (weight, slope, kernel))
    hidden = functional.prelu(functional.conv2d(torch.from_numpy(x), k.permute(3, 2, 0, 1)), s)
    (functional.linear(hidden.flatten(1), w) ** 2).mean().backward()
    for array, tensor in zip(found, (w, s, k), strict=True):
        assert array.shape == tuple(tensor.shape)
        np.testing.assert_allclose(array, tensor.grad, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_read_twice_stays_one(tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        "g (float[n, 6] x) => (float[n, 6] y) { t = Transpose (w)  h = MatMul (x, t)  y = MatMul (h, w) }",
        w=floats(4, 6),
    )
    model = Model.from_onnx(path)
    assert set(model.parameters) == {"w"}
    assert operators(model) == {"Transpose": 1, "MatMul": 2}


# Float16 numbers are written as their bits: 0.5 and 1.
ISLAND = """g (float[n, 4] x) => (float[n, 3] y) <float16[1] half = {14336}> {
    a = Cast <to = 10> (x)  b = MatMul (a, w)  c = Mul (b, half)  d = Cast <to = 1> (c)  y = Relu (d)
}"""
WHOLE = """g (float16[n, 4] x) => (float16[n, 3] y) {
    b = MatMul (x, w)  s = Shape (b)  z = ConstantOfShape <value = float16[1] {15360}> (s)  c = Add (b, z)  y = Relu (c)
}"""


@pytest.mark.parametrize("text", [ISLAND, WHOLE], ids=["island", "whole"])
def test_float16_becomes_float32(text: str, tmp_path: Path) -> None:
    weight = floats(4, 3).astype(np.float16)
    path = saved(tmp_path, text, w=weight)
    model = Model.from_onnx(path)
    check_model(model.ir)
    assert all("float16" not in port.dtype for port in (*model.inputs, *model.outputs))
    assert "Cast" not in operators(model)
    np.testing.assert_array_equal(model.parameters["w"], weight.astype(np.float32))
    assert model.parameters["w"].dtype == np.float32
    report = model.import_report
    assert report is not None
    assert report.deviation is not None
    assert report.deviation < 5e-3  # what float16 rounds, where ONNX Runtime does
    assert report.notes[0].startswith("float16 became float32")
    assert ("'x', 'y'" in report.notes[0]) == (text is WHOLE)
    x = floats(5, 4)
    expected = x @ weight.astype(np.float64)
    expected = np.maximum(expected * 0.5 if text is ISLAND else expected + 1, 0)
    np.testing.assert_allclose(run(model, x=x)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_saved_model_is_read_as_it_is(tmp_path: Path) -> None:
    """What archipel wrote has been cleaned, or is meant: its float16 stays, and so does the report."""
    model = Model.from_onnx(saved(tmp_path, ISLAND, w=floats(4, 3).astype(np.float16)))
    model.save(tmp_path / "again.onnx")
    again = Model.from_onnx(tmp_path / "again.onnx")
    assert again.import_report == model.import_report
    assert again.parameter_names == model.parameter_names
    proto = onnx.load(saved(tmp_path, ISLAND, w=floats(4, 3).astype(np.float16)))
    proto.metadata_props.add(key="archipel.parameters", value='["w"]')
    (tmp_path / "meant.onnx").write_bytes(proto.SerializeToString())
    assert operators(Model.from_onnx(tmp_path / "meant.onnx"))["Cast"] == 2


def test_a_report_is_made_anew_for_a_file_from_elsewhere(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(HEAD + "g (float[n] x) => (float[n] y) { y = Neg (x) }")
    proto.metadata_props.add(key="archipel.import_deviation", value="0.5")
    proto.producer_name, proto.producer_version = "tool", "3"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    report = Model.from_onnx(tmp_path / "m.onnx").import_report
    assert report is not None
    assert (report.source, report.opset, report.deviation, report.notes) == ("ONNX (tool 3)", 17, 0.0, ())


def test_indices_are_drawn_within_their_table(tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        "g (int64[n, t] ids) => (float[n, t, 4] y) { e = Gather (table, ids)  y = Tanh (e) }",
        table=floats(7, 4),
    )
    report = Model.from_onnx(path).import_report
    assert report is not None
    assert (report.deviation, report.samples) == (0.0, 3)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    path = saved(tmp_path, "g (float[n] x) => (float[n] y) { r = RandomNormalLike (x)  y = Add (x, r) }")
    report = Model.from_onnx(path).import_report
    assert report is not None
    assert report.deviation is None
    assert "not compared with its source: RandomNormalLike '" in report.notes[0]
    assert "draws other numbers in each run" in report.notes[0]


def test_an_import_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, "g (float[n, 2] x) => (float[n, 2] y) { y = MatMul (x, w) }", w=floats(2, 2))

    def wrong(model: object) -> None:
        # As if a pass had a bug: another weight.
        value = model.graph.initializers["w"]  # type: ignore[attr-defined]
        value.const_value = onnx_import.ir.tensor(value.const_value.numpy() * 1.001, name="w")

    monkeypatch.setattr(onnx_import, "clean", wrong)
    with pytest.raises(ModelImportError, match=r"m\.onnx: the import differs from its source by 0\.001 of the largest"):
        Model.from_onnx(path)


STANDARD = """<ir_version: 8, opset_import: ["" : 17, "DOMAIN" : 1]>
g (float[n, 4] x) => (float[n, 4] y) { y = DOMAIN.Special (x) }"""
DOMAINS = {
    "com.microsoft": r"Special '.*' is of domain 'com.microsoft', not standard ONNX; ONNX Runtime's optimizer wrote it",
    "com.microsoft.nchwc": "ONNX Runtime's optimizer wrote it",
    "ai.onnx.ml": r"imported from the estimator, with Model\.from_sklearn",
    "ai.onnx.preview.training": "export the model for inference",
    "org.pytorch.aten": "export again with a newer PyTorch",
    "acme": "write it with standard operators, or give it a body as a model-local function",
}


@pytest.mark.parametrize("domain", DOMAINS)
def test_other_domains_are_refused_by_name(domain: str, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(STANDARD.replace("DOMAIN", "acme"))
    proto.opset_import[1].domain = proto.graph.node[0].domain = domain
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelImportError, match=DOMAINS[domain]):
        Model.from_onnx(tmp_path / "m.onnx")


OPERATORS = {
    "ATen": "is no ONNX operator any more; .*had no ONNX form",
    "ImageScaler": "is no ONNX operator any more; .*Core ML",
    "ScaledTanh": r"write it as Mul\(alpha, Tanh\(Mul\(beta, x\)\)\)",
    "Fly": "is no ONNX operator; write it with standard ones",
    "Mish": r"does not exist in opset 17, .*newest form is of opset",
}


@pytest.mark.parametrize("op_type", OPERATORS)
def test_operators_that_are_gone_are_refused_by_name(op_type: str, tmp_path: Path) -> None:
    text = "g (float[n, 4] x) => (float[n, 4] y) { y = OP (x) }".replace("OP", op_type)
    path = saved(tmp_path, text)
    with pytest.raises(
        ModelImportError, match=rf"{op_type} '.*' {OPERATORS[op_type]}|{op_type} '.*'.*{OPERATORS[op_type]}"
    ):
        Model.from_onnx(path)


@pytest.mark.parametrize("form", ["sequence", "optional", "map"])
def test_outputs_that_are_no_tensors_are_refused(form: str, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(HEAD + "g (float[n] x) => (float[n] y) { y = SequenceConstruct (x) }")
    tensor = helper.make_tensor_type_proto(1, [None])
    kind = onnx.TypeProto()
    match form:
        case "sequence":
            kind.CopyFrom(helper.make_sequence_type_proto(tensor))
        case "optional":
            kind.CopyFrom(helper.make_optional_type_proto(tensor))
        case _:
            kind.CopyFrom(helper.make_map_type_proto(7, tensor))
    proto.graph.output[0].type.CopyFrom(kind)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelImportError, match=f"output 'y' is not a tensor but {form}_type; give it as tensors"):
        Model.from_onnx(tmp_path / "m.onnx")


def test_group_normalization_between_other_nodes(tmp_path: Path) -> None:
    """ONNX's inference does not know its result; the file says nothing about it either."""
    text = """<ir_version: 10, opset_import: ["" : 21]> agraph (float[n, 4, 3] x) => (float[n, 4, 3] y)
        <float[4] scale = {1, 2, 3, 4}, float[4] b = {0.5, 0, -1, 2}> {
        h = Neg (x)  g = GroupNormalization <num_groups = 2> (h, scale, b)  y = Tanh (g)
    }"""
    model = Model.from_onnx(saved(tmp_path, text))
    check_model(model.ir)
    x, weights = floats(2, 4, 3), [torch.tensor([1.0, 2, 3, 4]), torch.tensor([0.5, 0, -1, 2])]
    expected = torch.tanh(functional.group_norm(-torch.from_numpy(x), 2, *weights))
    np.testing.assert_allclose(run(model, x=x)[0], expected.numpy(), rtol=1e-4, atol=1e-5)
    assert [port.name for port in autodiff.vjp(model, of=["y"], wrt=["scale"]).outputs] == ["y", "scale.grad"]
