"""Every kind of training, by one call."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel.errors import MissingExtraError
from archipel.training import losses, optimizers, schedules, step_graph
from archipel.training.cloud import Epoch, TrainConfig, TrainResult, prepare, train
from archipel.training.driver import StepRunner

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 5)).astype(np.float32)
CLASS = (X[:, 0] > X[:, 1]).astype(np.int64)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(make: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = make()
    return module


def mlp(outputs: int = 2, inputs: int = 5) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs)))


def losses_of(result: TrainResult) -> list[float]:
    return [epoch.train_loss for epoch in result.history]


@pytest.mark.sampled(every=4)
def test_reaches_the_optimum_that_plain_gradient_descent_finds() -> None:
    """Multinomial logistic regression is convex: both must come to the same loss."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200)
    corners = np.array([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    x = (corners[y] + rng.normal(size=(200, 2))).astype(np.float32)
    weights = np.zeros((3, 3))
    with_one = np.column_stack([x.astype(np.float64), np.ones(len(x))])
    for _ in range(5000):
        logits = with_one @ weights
        probabilities = np.exp(logits - logits.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        weights -= 0.5 * with_one.T @ (probabilities - np.eye(3)[y]) / len(x)
    optimum = -np.log(probabilities[np.arange(len(y)), y]).mean()
    config = TrainConfig(optimizer=optimizers.adam(lr=0.1), batch_size=200, epochs=300, patience=50)
    result = train(seeded(lambda: nn.Linear(2, 3)), (x, y), config, validation=(x, y))
    assert optimum - 1e-6 <= result.best.metrics["loss"] < optimum + 1e-3


@pytest.mark.sampled(every=3)
def test_a_graph_trains_to_what_its_step_graph_trains_to() -> None:
    model = archipel.Model.from_torch(mlp(), X[:2])
    optimizer = optimizers.sgd(momentum=0.9, weight_decay=1e-3, lr=schedules.cosine(0.1, steps=10))
    config = TrainConfig(loss=losses.cross_entropy(label_smoothing=0.1), optimizer=optimizer, batch_size=30, epochs=3)
    trainer = prepare(model, (X, CLASS), config)
    runner = StepRunner(step_graph(model, losses.cross_entropy(label_smoothing=0.1), optimizer))
    for batch in trainer.batches:
        device = runner.step((batch["input"], batch["label"]))
        assert float(trainer.step(batch)) == pytest.approx(device["loss"], rel=1e-5)
    for name, value in trainer.module.state_dict().items():
        np.testing.assert_allclose(value.numpy(), runner.tensors[name], rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(every=3)
def test_a_model_comes_back_with_trained_weights_and_its_own_names() -> None:
    model = archipel.Model.from_torch(mlp(), X[:2])
    before = {name: array.copy() for name, array in model.parameters.items()}
    result = archipel.train(model, (X, CLASS), TrainConfig(epochs=2), validation=(X, CLASS))
    assert [port.shape for port in result.model.inputs] == [port.shape for port in model.inputs]
    after = result.model.parameters
    assert set(after) == set(before)
    assert all(not np.array_equal(after[name], before[name]) for name in before)
    assert all(np.array_equal(model.parameters[name], before[name]) for name in before)
    for name, tensor in result.module.state_dict().items():
        np.testing.assert_array_equal(after[name], tensor.numpy())


@pytest.mark.sampled(every=3)
def test_stops_at_the_plateau_and_gives_back_the_best_weights() -> None:
    rng = np.random.default_rng(1)
    noisy, held = (rng.integers(0, 2, n) for n in (12, 300))
    x, x_held = ((rng.normal(size=(len(y), 5)) + y[:, None]).astype(np.float32) for y in (noisy, held))
    config = TrainConfig(optimizer=optimizers.adam(lr=0.03), batch_size=4, epochs=200, patience=5)
    result = train(mlp(), (x, noisy), config, validation=(x_held, held))
    found = [epoch.metrics["loss"] for epoch in result.history]
    assert result.best.number == int(np.argmin(found)) + 1
    assert len(found) == result.best.number + 5 < 200
    with torch.no_grad():
        logits = result.module(torch.from_numpy(x_held))
    loss = float(nn.functional.cross_entropy(logits, torch.from_numpy(held)))
    assert loss == pytest.approx(min(found), rel=1e-5)
    assert result.best.metrics["accuracy"] == pytest.approx(float((logits.argmax(1).numpy() == held).mean()))
    assert not result.module.training


@pytest.mark.sampled(every=3)
def test_regression() -> None:
    y = X @ np.array([[1.0], [-2.0], [0.5], [0.0], [3.0]], np.float32) + 0.7
    config = TrainConfig(loss="mse", optimizer={"name": "adam", "lr": 0.05}, epochs=60, metrics=("R2Score",))
    module = seeded(lambda: nn.Linear(5, 1))
    result = train(module, (X, y), config, validation=(X, y))
    # Least squares has the exact answer.
    np.testing.assert_allclose(module.weight.detach().numpy()[0], [1.0, -2.0, 0.5, 0.0, 3.0], atol=2e-2)
    assert result.best.metrics["R2Score"] > 0.999


def test_labels_that_would_broadcast_are_refused() -> None:
    config = TrainConfig(loss="mse")
    with pytest.raises(archipel.errors.TrainingError, match=r"outputs of the shape \[32, 1\].* got \[32\]; reshape"):
        train(mlp(1), (X, X[:, 0]), config)


def test_sequences_have_a_label_at_each_place() -> None:
    tokens = RNG.integers(0, 7, (64, 6))
    module = seeded(lambda: nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)))
    config = TrainConfig(loss=losses.cross_entropy(axis=-1), optimizer=optimizers.adam(lr=0.05), epochs=12)
    result = train(module, (tokens, (tokens + 1) % 7), config, validation=(tokens, (tokens + 1) % 7))
    assert result.best.metrics["accuracy"] == 1.0


def test_language_modelling_predicts_the_next_token_and_ignores_padding() -> None:
    starts = RNG.integers(1, 6, (64, 1))
    tokens = (starts + np.arange(8) - 1) % 5 + 1
    tokens[:, 6:] = 0  # padding
    module = seeded(lambda: nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 6)))
    loss = {"name": "cross_entropy", "axis": -1, "ignore_index": 0}
    config = TrainConfig(
        loss=loss, next_token=True, optimizer=optimizers.adam(lr=0.05), epochs=15, metrics=("Perplexity",)
    )
    result = train(module, {"tokens": tokens.astype(np.uint16)}, config, validation={"tokens": tokens})
    assert result.best.metrics["accuracy"] == 1.0
    assert result.best.metrics["Perplexity"] == pytest.approx(np.exp(result.best.metrics["loss"]), rel=1e-4)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 2), nn.Linear(3, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.one(left) + self.two(right)


@pytest.mark.sampled(every=3)
def test_several_inputs_go_to_the_arguments_of_their_names() -> None:
    extra = RNG.normal(size=(120, 3)).astype(np.float32)
    label = (X[:, 0] + extra[:, 1] > 0).astype(np.int64)
    data = {"right": extra, "label": label, "left": X}
    config = TrainConfig(optimizer=optimizers.adam(lr=0.05), epochs=15)
    assert train(seeded(Sum), data, config, validation=data).best.metrics["accuracy"] > 0.95
    model = archipel.Model.from_torch(seeded(Sum), (X[:2], extra[:2]))
    assert train(model, data, config, validation=data).best.metrics["accuracy"] > 0.95


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kind(x), self.size(x)


@pytest.mark.sampled(every=3)
def test_several_outputs_have_a_loss_each() -> None:
    size = X[:, 2:3] * 2
    data = {"x": X, "kind": CLASS, "length": size}
    loss = {"kind": "cross_entropy", "size": {"name": "mse", "weight": 0.25, "label": "length"}}
    config = TrainConfig(loss=loss, optimizer=optimizers.adam(lr=0.05), epochs=30, monitor="kind.accuracy")
    module = seeded(TwoHeads)
    result = train(module, data, config, validation=data)
    found = result.best.metrics
    with torch.no_grad():
        kind, length = module(torch.from_numpy(X))
    apart = float(nn.functional.mse_loss(length, torch.from_numpy(size)))
    entropy = float(nn.functional.cross_entropy(kind, torch.from_numpy(CLASS)))
    assert found["kind.accuracy"] > 0.9
    assert found["kind.loss"] == pytest.approx(entropy, rel=1e-4)
    assert found["size.loss"] == pytest.approx(apart, rel=1e-4)
    assert found["loss"] == pytest.approx(entropy + 0.25 * apart, rel=1e-4)


@pytest.mark.sampled(every=3)
def test_an_autoencoder_has_its_input_as_label() -> None:
    flat = X @ RNG.normal(size=(5, 5)).astype(np.float32)[:, :2] @ RNG.normal(size=(2, 5)).astype(np.float32)
    module = seeded(lambda: nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 5)))
    config = TrainConfig(loss="mse", label="input", optimizer=optimizers.adam(lr=0.05), epochs=40)
    result = train(module, flat, config)
    assert result.history[-1].train_loss < 0.05 * float((flat**2).mean())


def test_a_loss_may_be_a_function() -> None:
    def hinge(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.relu(1 - outputs[:, 0] * (2.0 * batch["label"] - 1)).mean()

    result = train(mlp(1), (X, CLASS), TrainConfig(loss=hinge, epochs=10), validation=(X, CLASS))
    with torch.no_grad():
        scores = result.module(torch.from_numpy(X))[:, 0].numpy()
    assert result.best.metrics["loss"] == pytest.approx(np.maximum(0, 1 - scores * (2 * CLASS - 1)).mean(), rel=1e-4)


def test_same_seed_same_numbers_and_generators_stay_where_they_were() -> None:
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def run(seed: int) -> list[float]:
        module.load_state_dict(start)
        return losses_of(train(module, (X, CLASS), TrainConfig(seed=seed, epochs=2)))

    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = run(4)
    assert torch.equal(torch.rand(3), expected)
    assert run(4) == first
    assert run(5) != first


def test_accumulated_minibatches_make_the_update_of_one_large_batch() -> None:
    whole, parts = mlp(), mlp()
    common = {"optimizer": optimizers.sgd(lr=0.1), "epochs": 3, "clip": 0.5}
    first = train(whole, (X, CLASS), TrainConfig(batch_size=40, **common))
    second = train(parts, (X, CLASS), TrainConfig(batch_size=10, accumulate=4, **common))
    assert first.history[-1].updates == second.history[-1].updates == 9
    for one, other in zip(whole.parameters(), parts.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_frozen_parameters_keep_their_values() -> None:
    module = mlp()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    train(module, (X, CLASS), TrainConfig(trainable="2.*", epochs=1, optimizer=optimizers.adamw()))
    changed = {name for name, value in module.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"2.weight", "2.bias"}


def test_validation_has_the_moving_average() -> None:
    """Against the recursion written out, in float64."""
    seen: list[list[np.ndarray]] = []
    module = seeded(lambda: nn.Linear(5, 2))
    trainer = prepare(module, (X, CLASS), TrainConfig(ema=0.9, optimizer=optimizers.sgd(lr=0.5), epochs=1))
    average = [p.detach().numpy().astype(np.float64) for p in module.parameters()]
    for batch in trainer.batches:
        loss = trainer.step(batch)
        for callback in trainer.callbacks:
            callback.after_batch(trainer, loss)
        seen.append([p.detach().numpy().copy() for p in module.parameters()])
        average = [0.9 * a + 0.1 * p for a, p in zip(average, seen[-1])]
    logits = X @ average[0].T + average[1]
    shifted = logits - logits.max(1, keepdims=True)
    loss = -(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))[np.arange(len(X)), CLASS].mean()
    assert trainer.evaluate((X, CLASS))["loss"] == pytest.approx(loss, rel=1e-5)
    assert np.array_equal(next(module.parameters()).detach().numpy(), seen[-1][0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_train_to_about_the_same(precision: Any) -> None:
    config = {"optimizer": optimizers.adam(lr=0.01), "epochs": 6}
    exact = losses_of(train(mlp(), (X, CLASS), TrainConfig(**config)))
    rough = losses_of(train(mlp(), (X, CLASS), TrainConfig(precision=precision, **config)))
    assert rough != exact
    np.testing.assert_allclose(rough, exact, rtol=0.02)


def test_ends_after_so_many_updates() -> None:
    result = train(mlp(), (X, CLASS), TrainConfig(steps=10, batch_size=30))
    assert [epoch.updates for epoch in result.history] == [4, 8, 10]


def test_the_threads_are_those_of_the_training_alone() -> None:
    used: set[int] = set()

    def look(epoch: Epoch) -> None:
        used.add(torch.get_num_threads())

    train(mlp(), (X, CLASS), TrainConfig(epochs=1, threads=2), on_epoch=look)
    assert used == {2}
    assert torch.get_num_threads() == 1


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mlp()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="torch is not installed"):
        train(module, (X, CLASS))


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_as_the_config_says_and_then_as_before(allowed: bool) -> None:
    seen = []

    class Note(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
            return super().forward(x)

    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    x = np.ones((4, 2), np.float32)
    train(Note(2, 2), (x, np.zeros(4, np.int64)), TrainConfig(epochs=1, tf32=allowed, device="cpu"))
    assert set(seen) == {(allowed, allowed)}
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before
