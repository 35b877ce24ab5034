"""What a module does not train stays as it is wherever its graph is trained: buffers, and frozen parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel import Model, bundle, compression, converter, lite_runtime, preprocessing, training
from archipel.errors import GraphError
from archipel.graph.parameters import FIXED_KEY, trainable_names
from archipel.graph.source_state import source_state
from archipel.training.cloud import TorchModule, TrainConfig


class Encoded(nn.Module):
    """Adds a table of positions, which is a buffer; its first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(-1, 1, 6))
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x + self.positions)))  # type: ignore[no-any-return]


X = np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32)
Y = np.arange(32) % 3
LEARNED = ["last.bias", "last.weight"]


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return Encoded()


@pytest.fixture
def model(module: nn.Module) -> Model:
    return Model.from_torch(module, torch.zeros(2, 6))


@pytest.mark.sampled(every=3)
def test_steps_equal_those_of_the_source(module: nn.Module, model: Model) -> None:
    own = TorchModule(model)
    assert [name for name, _ in own.named_buffers() if "constants" not in name] == ["positions"]
    assert sorted(name for name, each in own.named_parameters() if each.requires_grad) == LEARNED
    step = training.step_graph(model, training.losses.cross_entropy(), training.optimizers.sgd())
    assert sorted(step.initial) == LEARNED
    losses = training.run_steps(step, [(X, Y)] * 5, {"lr": 0.5})
    for each in (module, own):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.5)
        for expected in losses:
            loss = nn.functional.cross_entropy(each(torch.from_numpy(X)), torch.from_numpy(Y))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.sampled(every=3)
def test_a_glob_takes_what_is_frozen_and_no_buffers(model: Model) -> None:
    assert sorted(trainable_names(model.ir, "*")) == LEARNED
    assert set(trainable_names(model.ir, ["first.*", "*s", "last.bias"])) == {"first.weight", "first.bias", "last.bias"}


@pytest.mark.sampled(every=3)
def test_a_buffer_alone_is_refused(model: Model) -> None:
    with pytest.raises(GraphError, match=r"'pos\*' matches only buffers of the model's source \(positions\)"):
        trainable_names(model.ir, "pos*")


def test_a_model_may_have_nothing_to_train() -> None:
    model = Model.from_torch(nn.BatchNorm1d(3, affine=False).eval(), torch.randn(2, 3))
    assert trainable_names(model.ir, "*") == []
    assert TorchModule(model)(torch.zeros(2, 3)).shape == (2, 3)


@pytest.mark.sampled(every=3)
def test_a_damaged_record_is_an_error(model: Model) -> None:
    model.ir.metadata_props[FIXED_KEY] = '{"buffers": 3}'
    with pytest.raises(GraphError, match="record of the source's buffers is damaged"):
        trainable_names(model.ir, "*")


@pytest.mark.sampled(every=3)
def test_the_record_goes_with_the_model(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "model.onnx")
    prepared = preprocessing.put_before(model, [preprocessing.Raw("uint8", ("batch", 6)), preprocessing.Scale()])
    small, _ = compression.compress(model, [compression.PruneWeights(0.5)])
    for each in (Model.from_onnx(tmp_path / "model.onnx"), prepared, small, TorchModule(model).to_model()):
        assert sorted(trainable_names(each.ir, "*")) == LEARNED


@pytest.mark.sampled(every=3)
def test_a_bundle_keeps_it_and_gives_the_whole_state_back(module: nn.Module, model: Model, tmp_path: Path) -> None:
    key = bundle.generate_key()
    recipe = converter.Training(training.losses.cross_entropy(), training.optimizers.sgd(), batch_size=8)
    archipel.convert(model, tmp_path / "b.bundle", training=recipe, signing=converter.Signing(key))
    trusted = [key.public_key().public_bytes_raw()]
    runtime = lite_runtime.load(tmp_path / "b.bundle", trusted_keys=trusted)
    runtime.fit(X, Y, epochs=1, hyperparameters={"lr": 0.1})
    runtime.save(tmp_path / "learned")
    archipel.export(tmp_path / "learned", tmp_path / "learned.onnx", trusted)
    learned = Model.from_onnx(tmp_path / "learned.onnx")
    assert sorted(trainable_names(learned.ir, "*")) == LEARNED
    state = source_state(learned)
    module.load_state_dict({name: torch.tensor(array) for name, array in state.items()}, strict=True)
    np.testing.assert_array_equal(state["positions"], model.parameters["positions"])
    assert not np.array_equal(state["last.weight"], model.parameters["last.weight"])


@pytest.mark.sampled(every=3)
def test_trainable_freezes_for_one_training_alone(module: nn.Module) -> None:
    result = archipel.train(module, (X, Y), TrainConfig(epochs=1, device="cpu", trainable="last.bias"))
    assert sorted(name for name, each in module.named_parameters() if each.requires_grad) == LEARNED
    assert sorted(trainable_names(result.model.ir, "*")) == LEARNED


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.sampled(every=8)
def test_encoder_layers_with_a_mask(norm_first: bool) -> None:
    """In evaluation mode PyTorch computes them by fused operators, and compares the mask with the causal one."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
            self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.layers(x, mask=mask)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, x = Causal().eval(), torch.randn(3, 5, 8)
    own = TorchModule(Model.from_torch(module, torch.zeros(2, 5, 8)))
    assert set(own.state_dict()) == set(module.state_dict())
    torch.testing.assert_close(own(x), module(x), rtol=1e-5, atol=1e-6)
    changed = x.clone()
    changed[:, 3:] += 1
    torch.testing.assert_close(own(changed)[:, :3], own(x)[:, :3])  # nothing looks ahead
