"""What was learned is a file again: PyTorch takes it with strict=True, ONNX Runtime runs it, `convert` reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from torch import nn

from archipel import Model, export
from archipel.bundle import ModelCard, decode_card, generate_key, pack, write_weights
from archipel.compression import DynamicInt8, PruneWeights, StaticInt8, WeightOnly
from archipel.converter import Compression, Signing, Training, convert, open_model
from archipel.errors import ArchipelError
from archipel.graph.model_card import card_of, set_card
from archipel.lite_runtime import Runtime
from archipel.training import losses, optimizers

KEY = generate_key()
PUBLIC = [KEY.public_key().public_bytes_raw()]
FLOAT = np.float32
SLOW = pytest.mark.slow


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


class Tied(nn.Module):
    """One weight under two names, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return logits


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 8), nn.PReLU(8),
        nn.Linear(8, 3),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutional": (convolutional, (1, 6, 6)),
    "perceptron": (perceptron, (6,)),
    "recurrent": (Recurrent, (5, 4)),
    "tied": (Tied, (6,)),
}


def made(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return NETWORKS[name][0]().eval()


def data(name: str, count: int = 48) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((count, *NETWORKS[name][1])).astype(FLOAT)
    return x, np.arange(count) % 3


def answers(network: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        result: np.ndarray = network(torch.from_numpy(x)).numpy()
    return result


def trained(name: str, folder: Path, options: Mapping[str, object] | None = None, parts: object = None) -> Runtime:
    """The network's bundle, `folder / "b"`, and a runtime that has learned."""
    x, y = data(name)
    training = Training(losses.cross_entropy(), optimizers.sgd(lr=0.2), batch_size=8, **(options or {}))  # type: ignore[arg-type]
    compression = None if parts is None else Compression(parts, calibration={"input": x})  # type: ignore[arg-type]
    bundle = convert(made(name), folder / "b", example=torch.from_numpy(x[:2]), training=training,
                     compression=compression, signing=Signing(KEY))  # fmt: skip
    device = Runtime(bundle)
    device.fit(x, y, epochs=4, batch_size=8)
    return device


def run_onnx(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [field], [answer] = session.get_inputs(), session.get_outputs()
    assert (field.name in ("input", "x"), answer.name) == (True, "output")  # as PyTorch's exporter calls them
    result: np.ndarray = session.run(None, {field.name: x})[0]
    return result


@pytest.mark.parametrize("name", [*sorted(set(NETWORKS) - {"recurrent"}), pytest.param("recurrent", marks=SLOW)])
@pytest.mark.sampled(every=4)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    x, _ = data(name)
    device = trained(name, tmp_path)
    (tmp_path / "w.safetensors").write_bytes(write_weights(device.parameters()))
    device.save(tmp_path / "saved")
    expected = device.predict(x)
    assert np.abs(expected - answers(made(name), x)).max() > 0.05  # it did learn something
    for kind in ("onnx", "safetensors", "pt"):
        export(tmp_path / "b", tmp_path / f"m.{kind}", PUBLIC, weights=tmp_path / "w.safetensors")
        export(tmp_path / "saved", tmp_path / f"s.{kind}", PUBLIC)
        export(tmp_path / "b", tmp_path / f"a.{kind}", PUBLIC, weights=device.parameters())
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"m.{kind}").read_bytes()
    for file in ("m", "s"):
        states = (
            safetensors.torch.load_file(tmp_path / f"{file}.safetensors"),
            torch.load(tmp_path / f"{file}.pt", weights_only=True),
        )
        for state in states:
            back = made(name, seed=1)
            back.load_state_dict(state, strict=True)
            np.testing.assert_allclose(answers(back, x), expected, atol=1e-5)
        np.testing.assert_allclose(run_onnx(tmp_path / f"{file}.onnx", x), expected, atol=1e-5)
    # The names of the source outlive one more time around.
    again = Model.from_onnx(tmp_path / "m.onnx")
    training = Training(losses.cross_entropy(), optimizers.sgd(lr=0.2), batch_size=8)
    bundle = convert(again, tmp_path / "again", training=training, signing=Signing(KEY))
    assert {spec.name: spec.shape for spec in bundle.manifest.parameters} == {
        name: array.shape for name, array in device.parameters().items()
    }
    other = Runtime(bundle)
    np.testing.assert_allclose(other.predict(x), expected, atol=1e-5)
    other.fit(*data(name), epochs=1, batch_size=8)
    other.save(tmp_path / "more")
    export(tmp_path / "more", tmp_path / "more.pt", PUBLIC)
    back.load_state_dict(torch.load(tmp_path / "more.pt", weights_only=True), strict=True)
    np.testing.assert_allclose(answers(back, x), other.predict(x), atol=1e-5)


@pytest.mark.parametrize(
    "parts",
    [
        [StaticInt8()],
        [PruneWeights(sparsity=0.5)],
        pytest.param([WeightOnly()], marks=SLOW),
        pytest.param([DynamicInt8()], marks=SLOW),
    ],
)
@pytest.mark.sampled(every=8)
def test_a_compressed_model_exports_the_float_model_behind_it(parts: list[object], tmp_path: Path) -> None:
    x, _ = data("convolutional")
    device = trained("convolutional", tmp_path, parts=parts)
    device.save(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "m.pt", PUBLIC)
    export(tmp_path / "saved", tmp_path / "m.onnx", PUBLIC)
    back = made("convolutional", seed=1)
    back.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True), strict=True)
    # Of what devices trained, not of what they predict with: that is rounded to integers.
    state = back.state_dict()
    for name, array in device.parameters().items():
        np.testing.assert_array_equal(state[name].numpy(), array)
    expected = answers(back, x)
    np.testing.assert_allclose(run_onnx(tmp_path / "m.onnx", x), expected, atol=1e-5)
    assert (expected.argmax(1) == device.predict(x).argmax(1)).mean() > 0.9


@pytest.mark.parametrize(
    "strategy", ["lora", "fedbn", pytest.param("ditto", marks=SLOW), pytest.param("fedrep", marks=SLOW)]
)
@pytest.mark.sampled(every=4)
def test_what_a_strategy_keeps_on_the_device_is_in_its_model(strategy: str, tmp_path: Path) -> None:
    """Adapters are merged into their weights; statistics, heads and copies that never leave the device are those of
    the model that was saved there."""
    x, _ = data("convolutional")
    options = {
        "lora": {"strategy": "lora", "trainable": ["5.weight", "7.weight"], "step_options": {"batch_norm": "frozen"}},
        "fedrep": {"strategy": "fedrep", "strategy_options": {"personal": "7.*"}},
    }
    device = trained("convolutional", tmp_path, options.get(strategy, {"strategy": strategy}))
    device.save(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "m.pt", PUBLIC)
    export(tmp_path / "saved", tmp_path / "m.onnx", PUBLIC)
    expected = device.predict(x)
    assert np.abs(expected - answers(made("convolutional"), x)).max() > 0.05
    back = made("convolutional", seed=1)
    back.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True), strict=True)
    np.testing.assert_allclose(answers(back, x), expected, atol=1e-5)
    np.testing.assert_allclose(run_onnx(tmp_path / "m.onnx", x), expected, atol=1e-5)
    assert not [name for name in Model.from_onnx(tmp_path / "m.onnx").parameters if "lora" in name]


@pytest.mark.sampled(every=4)
def test_a_bundle_that_only_predicts(tmp_path: Path) -> None:
    x, _ = data("perceptron")
    network, example = made("perceptron"), torch.from_numpy(x[:2])
    convert(network, tmp_path / "float", example=example, signing=Signing(KEY))
    convert(network, tmp_path / "int8", example=example, signing=Signing(KEY),
            compression=Compression([StaticInt8()], calibration={"input": x}))  # fmt: skip
    export(tmp_path / "float", tmp_path / "m.onnx", PUBLIC)
    np.testing.assert_allclose(run_onnx(tmp_path / "m.onnx", x), answers(network, x), atol=1e-6)
    with pytest.raises(ArchipelError, match=r"only predicts.*export \.onnx, or convert with a loss"):
        export(tmp_path / "float", tmp_path / "m.pt", PUBLIC)
    with pytest.raises(ArchipelError, match=r"only predicts, and has no float parameters: .* reads integers"):
        export(tmp_path / "int8", tmp_path / "n.onnx", PUBLIC)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "int8", "m.onnx"]


@pytest.mark.sampled(every=4)
def test_errors(tmp_path: Path) -> None:
    device = trained("perceptron", tmp_path)
    good, first, out = device.parameters(), device.bundle.parameters(), tmp_path / "m.onnx"

    def refused(match: str, weights: object = None, target: Path = out, **options: bool) -> None:
        file = None
        if isinstance(weights, Mapping):
            file = tmp_path / "w"
            file.write_bytes(write_weights(weights))
        elif isinstance(weights, Path):
            file = weights
        with pytest.raises(ArchipelError, match=match):
            export(tmp_path / "b", target, PUBLIC, weights=file, **options)
        assert not out.exists()

    other = {**good, "0.weight": np.zeros((8, 5), FLOAT)}
    refused(r"w: '0.weight' is float32\[8, 5\], but float32\[8, 6\] in bundle 'b'; give the bundle of the task", other)
    refused("w: has no 2.bias, of the parameters", {name: good[name] for name in good if name != "2.bias"})
    refused("w: 'ghost' is no parameter of bundle 'b', which has 0.weight", {**good, "ghost": np.zeros(1, FLOAT)})
    refused("nothing: no such file of weights", tmp_path / "nothing")
    refused("manifest.json: not a safetensors file", tmp_path / "b" / "manifest.json")
    refused(r"m\.h5: expected a name that ends in \.onnx, \.safetensors, \.pt", target=tmp_path / "m.h5")
    (tmp_path / "there.onnx").write_bytes(b"mine")
    refused("there.onnx: exists already; choose another name", target=tmp_path / "there.onnx")
    assert (tmp_path / "there.onnx").read_bytes() == b"mine"
    export(tmp_path / "b", tmp_path / "there.onnx", PUBLIC, force=True)
    assert Model.from_onnx(tmp_path / "there.onnx").parameter_names
    with pytest.raises(ArchipelError, match="no trusted keys given"):
        export(tmp_path / "b", out)
    pack(tmp_path / "b", tmp_path / "b.bundle")
    for bundle in (tmp_path / "b", tmp_path / "b.bundle"):
        with pytest.raises(ArchipelError, match=r"b(\.bundle)?: a bundle: `archipel export` makes an ONNX file of it"):
            convert(bundle, tmp_path / "again", signing=Signing(KEY))
        np.testing.assert_array_equal(open_model(bundle, PUBLIC, cache=tmp_path).parameters["0.bias"], first["0.bias"])


@pytest.mark.sampled(every=3)
def test_a_model_and_a_file_export_too(tmp_path: Path) -> None:
    x, _ = data("tied")
    model = Model.from_torch(made("tied"), torch.from_numpy(x[:2]))
    export(model, tmp_path / "m.onnx")
    export(tmp_path / "m.onnx", tmp_path / "m.safetensors")
    back = made("tied", seed=1)
    back.load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"), strict=True)
    np.testing.assert_allclose(answers(back, x), answers(made("tied"), x), atol=1e-6)
    with pytest.raises(ArchipelError, match=r"m\.onnx: weights are for a bundle"):
        export(tmp_path / "m.onnx", tmp_path / "n.onnx", weights=tmp_path / "m.safetensors")


def test_pt_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ArchipelError, match=r"torch is not installed; install it with: pip install 'archipel\[cloud\]'"
    ):
        export(tmp_path / "nothing", tmp_path / "m.pt", PUBLIC)


@pytest.mark.sampled(every=3)
def test_the_card_goes_along(tmp_path: Path) -> None:
    model = Model.from_torch(perceptron().eval(), torch.zeros(2, 6))
    card = ModelCard(name="stripes", description="Two stripes.", task="classification", licence="MIT")
    set_card(model.ir, card)
    files = {suffix: tmp_path / f"m{suffix}" for suffix in (".onnx", ".safetensors", ".pt")}
    for path in files.values():
        export(model, path)
    assert card_of(Model.from_onnx(files[".onnx"]).ir) == card
    with safetensors.safe_open(files[".safetensors"], "np") as held:
        assert decode_card(held.metadata()["archipel.card"].encode()) == card
    state = torch.load(files[".pt"], weights_only=True)
    assert decode_card(state._metadata["archipel.card"].encode()) == card
    perceptron().load_state_dict(state, strict=True)
