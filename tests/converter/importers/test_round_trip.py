"""From PyTorch to a bundle, trained on a device, and back: `load_state_dict(strict=True)` takes what was learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model
from archipel.bundle import generate_key
from archipel.compression import CompressedModel
from archipel.converter import Signing, Training, convert
from archipel.converter.importers.torch_module import quiet
from archipel.errors import GraphError
from archipel.graph import source_state as states
from archipel.graph.parameters import STATE_KEY
from archipel.graph.source_state import source_state
from archipel.lite_runtime import Runtime
from archipel.training import losses, optimizers


class Tied(nn.Module):
    """Tied weights, Linear layers on sequences, a slope, statistics with a counter, and tensors that nothing reads."""

    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.slope = nn.PReLU(6)
        self.decoder = nn.Linear(6, 7)
        self.decoder.weight = self.tokens.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("counts", torch.tensor([4, 5, 6]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.tokens(x))
        mixed: torch.Tensor = self.decoder(self.slope(self.norm(hidden.transpose(1, 2))).transpose(1, 2))
        return mixed


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return Tied().eval()


@pytest.fixture(scope="module")
def model(network: nn.Module) -> Model:
    return Model.from_torch(network, torch.zeros(2, 5, dtype=torch.int64))


@pytest.mark.sampled(every=3)
def test_the_state_is_that_of_the_module(network: nn.Module, model: Model, tmp_path: Path) -> None:
    expected = network.state_dict()
    model.save(tmp_path / "m.onnx")
    # Also from the file, and behind compression, which copies the model.
    for source in (model, Model.from_onnx(tmp_path / "m.onnx"), CompressedModel.of(model)):
        state = source_state(source)
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            np.testing.assert_array_equal(state[name], tensor.numpy())
            assert state[name].dtype == tensor.numpy().dtype


@pytest.mark.sampled(every=3)
def test_there_and_back(network: nn.Module, model: Model, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 7, (16, 5)), rng.integers(0, 7, (16, 5))
    training = Training(
        losses.cross_entropy(axis=-1), optimizers.sgd(lr=0.5), batch_size=8, step_options={"batch_norm": "frozen"}
    )
    bundle = convert(model, tmp_path / "b", training=training, signing=Signing(generate_key()))
    parameters = {name: tuple(value.shape) for name, value in network.named_parameters() if name != "unused"}
    parameters["decoder.weight"] = parameters.pop("tokens.weight")  # one tensor of two names: the exporter chooses one
    assert {spec.name: spec.shape for spec in bundle.manifest.parameters} == parameters
    device = Runtime(bundle)
    device.fit(x, y, epochs=3, batch_size=8)
    learned = source_state(model, device.parameters())
    back = Tied().eval()
    back.load_state_dict({name: torch.tensor(array) for name, array in learned.items()}, strict=True)
    expected = back(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(device.predict(x), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - network(torch.from_numpy(x)).detach().numpy()).max() > 0.1  # it did learn something


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.cat([self.token.expand(len(x), -1, -1), x], 1).transpose(0, 1)
        mixed: torch.Tensor = self.head(self.attention(steps, steps, steps, need_weights=False)[0][0])
        return mixed


@pytest.mark.sampled(every=4)
def test_a_file_of_a_fixed_batch_there_and_back(tmp_path: Path) -> None:
    """Exported for two examples, trained with sixteen. The factor of the attention, a constant, is not trained."""
    torch.manual_seed(0)
    network, path = Attention().eval(), tmp_path / "m.onnx"
    with quiet():
        torch.onnx.export(network, (torch.randn(2, 4, 8),), path, dynamo=True, optimize=False, verbose=False)
    training = Training(losses.cross_entropy(), optimizers.sgd(lr=0.1))
    device = Runtime(convert(path, tmp_path / "b", training=training, signing=Signing(generate_key())))
    x = np.random.default_rng(0).standard_normal((40, 4, 8)).astype(np.float32)
    device.fit(x, np.arange(40) % 3, epochs=5)
    learned = device.parameters()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert {name: array.shape for name, array in learned.items()} == shapes
    back = Attention().eval()
    back.load_state_dict({name: torch.tensor(array) for name, array in learned.items()}, strict=True)
    expected = back(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(device.predict(x), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - network(torch.from_numpy(x)).detach().numpy()).max() > 0.01


@pytest.mark.sampled(every=3)
def test_what_is_too_large_is_named(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_BYTES", 16)  # the unused parameter, and no counter behind it
    model = Model.from_torch(network, torch.zeros(2, 5, dtype=torch.int64))
    assert set(network.state_dict()) - set(source_state(model)) == {"counts", "norm.num_batches_tracked"}
    assert model.import_report is not None
    assert model.import_report.notes == (
        "the graph does not read counts, norm.num_batches_tracked, which are too large to be kept beside it",
    )


@pytest.mark.parametrize(
    ("values", "record", "message"),
    [
        ({"mix.bias": np.zeros(5)}, None, r"'mix.bias', of shape \[5\], has shape \[6\]"),
        ({"ghost": np.zeros(5)}, None, r"'ghost', of shape \[5\], is no parameter of the model"),
        ({}, "[1]", "the record of the source's state is damaged"),
        ({}, '{"a": {"dtype": "int64", "shape": [2], "data": "AA=="}}', "the record of the source's state is damaged"),
        ({}, '{"a": {"dtype": "object", "shape": [1], "data": "AAAAAAAAAAA="}}', "is damaged"),
    ],
)
def test_errors(model: Model, values: dict[str, np.ndarray], record: str | None, message: str) -> None:
    other = model.copy()
    if record is not None:
        other.ir.metadata_props[STATE_KEY] = record
    with pytest.raises(GraphError, match=message):
        source_state(other, values)
