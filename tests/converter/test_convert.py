from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort
import pytest

from archipel import bundle as b
from archipel import training
from archipel.bundle import role_of
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.lite_runtime.engines.onnx_runtime import open_exact
from archipel.models import digits_cnn

KEY = b.generate_key()
TRUSTED = [KEY.public_key().public_bytes_raw()]
LOSS = training.losses.cross_entropy()
SGD = training.optimizers.sgd()


@pytest.fixture(scope="module")
def model() -> Model:
    import torch

    return Model.from_torch(digits_cnn(seed=1), torch.zeros(2, 1, 28, 28))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).random((64, 1, 28, 28), np.float32)


@pytest.fixture(scope="module")
def bundle(model: Model, images: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> b.Bundle:
    return convert(
        model, tmp_path_factory.mktemp("b") / "digits",
        training=Training(LOSS, SGD, strategy_options={"clip": 2.0, "value_range": 0.25}, epochs=2, batch_size=16),
        compression=Compression([StaticInt8()], calibration={model.inputs[0].name: images}), signing=Signing(KEY),
    )  # fmt: skip


def session(bundle: b.Bundle, name: str) -> ort.InferenceSession:
    return open_exact(str(bundle.program_path(name)), ort.SessionOptions())


@pytest.mark.sampled(every=4)
def test_programs_ports_and_graphs_agree(bundle: b.Bundle) -> None:
    assert set(bundle.manifest.programs) == {"predict", "evaluate", "train", "refresh", "finish"}
    for name, program in bundle.manifest.programs.items():
        runtime = session(bundle, name)
        for ports, nodes in ((program.inputs, runtime.get_inputs()), (program.outputs, runtime.get_outputs())):
            assert [port.name for port in ports] == [node.name for node in nodes]
            for port, node in zip(ports, nodes, strict=True):
                assert list(port.shape) == node.shape, (name, port.name)
                assert {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int8)": "int8",
                        "tensor(int32)": "int32"}[node.type] == port.dtype  # fmt: skip


@pytest.mark.sampled(every=3)
def test_every_tensor_is_stored_once(bundle: b.Bundle, model: Model) -> None:
    seen: dict[tuple[np.dtype, tuple[int, ...], bytes], str] = {}
    for name, values in bundle.tensors.items():
        if values.nbytes >= 256:
            assert seen.setdefault((values.dtype, values.shape, values.tobytes()), name) == name
    for name, values in model.parameters.items():
        np.testing.assert_array_equal(bundle.tensor(name), values)
    weight_bytes = sum(values.nbytes for values in bundle.tensors.values())
    for name in bundle.manifest.programs:
        assert bundle.program_path(name).stat().st_size < weight_bytes / 2


@pytest.mark.sampled(every=3)
def test_folder_and_file_are_the_same_bundle(
    bundle: b.Bundle, model: Model, images: np.ndarray, tmp_path: Path
) -> None:
    filed = convert(
        model, tmp_path / "digits.bundle",
        training=Training(LOSS, SGD, strategy_options={"clip": 2.0, "value_range": 0.25}, epochs=2, batch_size=16),
        compression=Compression([StaticInt8()], calibration={model.inputs[0].name: images}), signing=Signing(KEY),
    )  # fmt: skip
    assert filed.digest == bundle.digest  # deterministic, too
    assert [path.name for path in tmp_path.iterdir()] == ["digits.bundle"]
    b.pack(bundle.folder, tmp_path / "packed.bundle")
    assert (tmp_path / "packed.bundle").read_bytes() == (tmp_path / "digits.bundle").read_bytes()


def test_programs_compute_what_the_model_computes(bundle: b.Bundle, model: Model, images: np.ndarray) -> None:
    import torch

    module = digits_cnn(seed=1)
    labels = np.arange(64) % 10
    [answers] = session(bundle, "predict").run(None, {model.inputs[0].name: images})
    with torch.no_grad():
        np.testing.assert_allclose(answers, module(torch.tensor(images)).numpy(), atol=2e-3)
    # The loss is that of the answers, which are int8's.
    logits = torch.tensor(answers)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum").item()
    feeds = {"prediction": answers, "label": labels}
    found = dict(zip(["loss", "correct", "count"], session(bundle, "evaluate").run(None, feeds), strict=True))
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-5)
    assert int(found["correct"]) == int((logits.argmax(1).numpy() == labels).sum())
    assert int(found["count"]) == 64


def test_limits_are_counted_by_hand(bundle: b.Bundle) -> None:
    limits = bundle.manifest.limits
    parameters = sum(math.prod(spec.shape) for spec in bundle.manifest.parameters)
    assert limits.upload_bytes == 4 * (parameters + 1)
    # Multiply-accumulates of the forward pass: positions x kernel x channels. Training takes about three times that,
    # and more where the unfolding of the input and the padding of the input gradient count, as they do here.
    forward = 2 * (24 * 24 * 25 * 8 + 8 * 8 * 25 * 8 * 16 + 256 * 64 + 64 * 10)
    assert 2.5 * forward < limits.flops_per_example < 6 * forward
    # At least the batch's largest activation and its gradient, at most everything that is ever computed.
    activation = 16 * 8 * 24 * 24 * 4
    assert 2 * activation < limits.peak_bytes < 100 * activation


def test_without_a_loss_there_is_only_predict(model: Model, tmp_path: Path) -> None:
    bundle = convert(model, tmp_path / "p", signing=Signing(KEY))
    assert set(bundle.manifest.programs) == {"predict"}
    assert bundle.manifest.schedule == ()
    assert bundle.manifest.parameters == ()


def test_a_frozen_layer_is_not_a_parameter(model: Model, tmp_path: Path) -> None:
    bundle = convert(
        model, tmp_path / "p", training=Training(LOSS, SGD, trainable=["hidden.*", "output.*"]), signing=Signing(KEY)
    )
    names = {spec.name for spec in bundle.manifest.parameters}
    assert names == {"hidden.weight", "hidden.bias", "output.weight", "output.bias"}
    assert {p.tensor for p in bundle.program("refresh").outputs if role_of(p) == "derived"} == names
    np.testing.assert_array_equal(bundle.tensor("conv2.weight"), model.parameters["conv2.weight"])


@pytest.mark.sampled(every=4)
def test_a_file_and_a_module_are_sources_too(model: Model, tmp_path: Path) -> None:
    import torch

    model.save(tmp_path / "m.onnx")
    from_file = convert(
        tmp_path / "m.onnx", tmp_path / "a", name="x", training=Training(LOSS, SGD), signing=Signing(KEY)
    )
    module = convert(
        digits_cnn(seed=1), tmp_path / "b", example=torch.zeros(2, 1, 28, 28), name="x", training=Training(LOSS, SGD),
        signing=Signing(KEY),
    )  # fmt: skip
    assert from_file.manifest.parameters == module.manifest.parameters


def test_other_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="got int"):
        convert(3, tmp_path / "x", signing=Signing(KEY))
    with pytest.raises(ConversionError, match="needs example="):
        convert(digits_cnn(seed=0), tmp_path / "x", signing=Signing(KEY))
    (tmp_path / "x").mkdir()
    with pytest.raises(ConversionError, match="exists already"):
        convert(tmp_path / "m.onnx", tmp_path / "x", signing=Signing(KEY))


def test_the_manifest_is_small_and_readable(bundle: b.Bundle) -> None:
    data = (bundle.folder / "manifest.json").read_bytes()
    assert msgspec.json.decode(data)["strategy"] == "fedavg"
    assert len(data) < 20_000
