"""Programs that make several steps in one graph: the same training, call for call fewer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import Model, models, training
from archipel.compression.deploy import deploy, refresh_program
from archipel.converter.lowering import predict_program
from archipel.errors import IndexRangeError, NonFiniteLossError, RuntimeInputError
from archipel.lite_runtime import Progress, Runtime
from archipel.lite_runtime.training.driver import find_repeated
from archipel.lite_runtime.training.loop import _Engine
from archipel.training.evaluation import score_graph
from tests.lite_runtime.training import graphs

K = 4


def build(folder: Path, key: Ed25519PrivateKey, **options: Any) -> Runtime:
    model = Model.from_torch(models.mlp(0), torch.zeros(2, 784))
    loss, optimizer = training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9)
    deployment = deploy(model)
    programs = {
        "predict": predict_program(deployment.predict),
        "train": training.step_graph(model, loss, optimizer, **options),
        "train.several": training.step_graph(model, loss, optimizer, steps=K, **options),
        "evaluate": score_graph(deployment.predict, loss),
        "refresh": refresh_program(deployment, model.parameters),
    }
    return Runtime(graphs.write(folder, programs, key, repeats={"train.several": "train"}))


@pytest.fixture
def rt(tmp_path: Path, key: Ed25519PrivateKey) -> Runtime:
    return build(tmp_path / "b", key)


def data(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, 784)).astype(np.float32) * 0.3, rng.integers(0, 10, count)


def one_by_one(rt: Runtime) -> Runtime:
    """The same bundle, in a runtime that was not told of the program of several steps."""
    programs = {name: program for name, program in rt.bundle.manifest.programs.items() if not program.repeats}
    manifest = type(rt.bundle.manifest)(
        **{f: getattr(rt.bundle.manifest, f) for f in rt.bundle.manifest.__struct_fields__} | {"programs": programs}
    )
    return Runtime(type(rt.bundle)(rt.bundle.folder, manifest, rt.bundle.digest, rt.bundle.publisher))


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = _Engine.run

    def run(self: _Engine, batches: Sequence[np.ndarray], rows: int, current: int) -> list[dict[str, float]]:
        calls.append(self.steps)
        return real(self, batches, rows, current)

    monkeypatch.setattr(_Engine, "run", run)
    return calls


@pytest.mark.parametrize("count", [8 * K * 2, 8 * K + 13, 7])
@pytest.mark.sampled(every=4)
def test_same_result_in_fewer_calls(rt: Runtime, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    assert find_repeated(rt.bundle, "train") == "train.several"
    x, y = data(count)
    arguments: dict[str, Any] = {"epochs": 2, "batch_size": 8, "validation": (x, y), "hyperparameters": {"lr": 0.05}}
    other = one_by_one(rt)
    expected = other.fit(x, y, **arguments)
    seen: list[Progress] = []
    calls = count_calls(monkeypatch)
    history = rt.fit(x, y, callbacks=[seen.append], **arguments)
    groups, rest = divmod(count // 8, K)
    # An epoch's groups do not reach into the next, and a smaller last batch comes alone.
    assert calls == ([K] * groups + [1] * (rest + (count % 8 > 0))) * 2
    np.testing.assert_allclose(history.losses, expected.losses, rtol=1e-5)
    assert history.steps == expected.steps == len(seen)
    assert [p.step for p in seen] == list(range(history.steps))
    for name, array in other.parameters().items():
        np.testing.assert_allclose(rt.parameters()[name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [2, K])
@pytest.mark.sampled(every=4)
def test_a_loss_that_is_not_finite_loses_one_step(rt: Runtime, bad: int) -> None:
    """Within a group, and in the step after one: the step before the bad one is not trusted, all others are kept."""
    x, y = data(8 * K * 2)
    x[8 * bad + 3] = np.inf
    with pytest.raises(NonFiniteLossError, match=f"step {bad}"):
        rt.fit(x, y, batch_size=8, shuffle=False)
    other = one_by_one(rt)
    other.reset("parameters")
    with pytest.raises(NonFiniteLossError, match=f"step {bad}"):
        other.fit(x, y, batch_size=8, shuffle=False)
    for name, array in other.parameters().items():
        assert np.isfinite(array).all()
        np.testing.assert_allclose(rt.parameters()[name], array, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled(every=4)
def test_tensors_that_stay_are_trained_one_step_at_a_time(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(8 * K)
    name = next(iter(rt.parameters()))
    calls = count_calls(monkeypatch)
    before = rt.parameters()
    rt.fit(x, y, batch_size=8, moves=[name])
    assert calls == [1] * K
    moved = [other for other, array in rt.parameters().items() if not np.array_equal(array, before[other])]
    assert moved == [name]


@pytest.mark.sampled(every=4)
def test_it_is_not_named_itself(rt: Runtime) -> None:
    x, y = data(8)
    with pytest.raises(RuntimeInputError, match=r"'train\.several' makes 4 steps at once; name 'train'"):
        rt.fit(x, y, program="train.several")


@pytest.mark.sampled(every=3)
def test_a_label_that_no_class_has_is_said_to_be_one(rt: Runtime) -> None:
    x, y = data(8)
    with pytest.raises(IndexRangeError, match="has a class number that the model does not have, in row 0: "):
        rt.fit(x, y + 10, epochs=1, batch_size=8)
