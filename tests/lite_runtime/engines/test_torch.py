"""PyTorch as an engine of the runtime: what it answers and learns against ONNX Runtime, on which device, and its
errors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel import bundle as b
from archipel import engine_registry, lite_runtime, strategies, training
from archipel.compression import StaticInt8
from archipel.converter import Analysis, Compression, Mean, Signing, Training, convert
from archipel.errors import DelegateError, IndexRangeError, MissingExtraError, NonFiniteLossError
from archipel.lite_runtime import Progress, Runtime
from archipel.lite_runtime.engines.delegates import preferences
from archipel.training.cloud.programs.engine import find_device

Load = Callable[..., Any]
Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 8), np.float32)
Y = RNG.standard_normal((40, 3), np.float32)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """(delegates): a regression network with normalization that learns with Adam, on these delegates."""
    folder, signer = tmp_path_factory.mktemp("torch"), b.generate_key()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).eval()
    learning = Training(training.losses.mse(), training.optimizers.adam(), epochs=2, batch_size=8)
    convert(network, folder / "m.bundle", example=X[:2], training=learning, signing=Signing(signer))
    trusted = [signer.public_key().public_bytes_raw()]

    def load(delegates: Any, **more: Any) -> Any:
        return lite_runtime.load(folder / "m.bundle", trusted, delegates=delegates, cache=folder / "cache", **more)

    return load


def close(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.sampled(every=3)
def test_it_predicts_learns_and_takes_part_in_rounds_as_onnx_runtime_does(load: Load) -> None:
    runs = []
    for delegates in ("cpu", "torch"):
        runtime = load(delegates)
        # Batches of 12 and a last one of 4: 20 steps.
        history = runtime.fit(X, Y, epochs=5, batch_size=12, seed=3, validation=(X, Y))
        assert len(history.losses) == 20
        assert history.losses[-1] < 0.9 * history.losses[0]
        update = runtime.local_round(X, Y, seed=5)
        validation = {f"{name}{epoch}": np.array(v) for epoch, each in enumerate(history.validation)
                      for name, v in each.items()}  # fmt: skip
        runs.append([runtime.parameters(), update.arrays, validation, {"losses": np.array(history.losses)},
                     {str(n): runtime.predict(X[:n]) for n in (1, 40)}])  # fmt: skip
    for expected, found in zip(*runs):
        close(found, expected)
    report = runtime.delegate_report()
    assert {each.delegates for each in report.programs.values()} == {("torch",)}
    assert report.skipped == ()
    assert {"train", "finish", "predict", "evaluate"} <= set(report.programs)


@pytest.mark.sampled(every=3)
def test_parameters_stay_on_the_device_between_steps(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the bytes of arrays that a fit hands to PyTorch: those of parameters do not grow with its steps."""
    from archipel.training.cloud.programs import engine

    moved: list[int] = []
    real = engine.to_numpy

    def count(tensor: torch.Tensor) -> np.ndarray:
        moved.append(tensor.numel())
        return real(tensor)

    monkeypatch.setattr(engine, "to_numpy", count)
    runtime, sizes = load("torch"), []
    for epochs in (1, 3):
        moved.clear()
        runtime.fit(X, Y, epochs=epochs, batch_size=8)
        sizes.append(sum(size for size in moved if size > 1))
    assert sizes[0] == sizes[1]
    # Parameters and the two moments of Adam, 16*8 + 16 + 3*16 + 3 numbers each, come back once.
    assert sizes[0] == 3 * 195


@pytest.mark.sampled(every=3)
def test_an_interrupted_fit_ends_bit_for_bit_where_an_uninterrupted_one_ends(load: Load, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 12, "seed": 1, "checkpoint_every": 0.0}
    whole = load("torch")
    whole.fit(X, Y, **options, checkpoint=tmp_path / "whole")

    def stop(progress: Progress) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load("torch").fit(X, Y, **options, checkpoint=tmp_path / "half", callbacks=[stop])
    resumed = load("torch")
    assert resumed.fit(X, Y, **options, checkpoint=tmp_path / "half").steps == 8
    for name, array in whole.parameters().items():
        assert array.tobytes() == resumed.parameters()[name].tobytes()


def test_after_a_loss_that_is_not_finite_the_last_good_weights_are_there(load: Load) -> None:
    bad = Y.copy()
    bad[30] = np.inf
    kept = []
    for delegates in ("cpu", "torch"):
        runtime = load(delegates)
        with pytest.raises(NonFiniteLossError, match="step 3"):
            runtime.fit(X, bad, batch_size=8, shuffle=False)
        kept.append(runtime.parameters())
    close(kept[1], kept[0])


def test_fits_one_after_the_other_and_predictions_between_them(load: Load) -> None:
    """What a fit leaves on the device must not be taken for what the next one starts from."""
    answers = []
    for delegates in ("cpu", "torch"):
        runtime = load(delegates)
        for seed in range(2):
            runtime.fit(X, Y, batch_size=8, seed=seed)
            answers.append(runtime.predict(X))
        runtime.reset("parameters")
        answers.append(runtime.predict(X))
    close(dict(zip("abc", answers[3:])), dict(zip("abc", answers)))
    assert np.abs(answers[0] - answers[1]).max() > 1e-3


def test_the_number_of_threads_of_the_process_stays_the_callers(load: Load) -> None:
    seen: list[int] = []
    runtime = load("torch", threads=2)
    runtime.fit(X, Y, callbacks=[lambda progress: seen.append(torch.get_num_threads())])
    assert set(seen) == {1}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("wrong", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (-1, 10**6))])
def test_labels_that_the_model_does_not_have_change_nothing(tmp_path: Path, wrong: int) -> None:
    signer = b.generate_key()
    learning = Training(training.losses.cross_entropy(), training.optimizers.sgd())
    convert(nn.Linear(8, 3), tmp_path / "m", example=X[:2], training=learning, signing=Signing(signer))
    runtime = lite_runtime.load(tmp_path / "m", [signer.public_key().public_bytes_raw()], delegates="torch")
    before = {name: array.copy() for name, array in runtime.parameters().items()}
    labels = RNG.integers(0, 3, 40)
    labels[5] = wrong
    with pytest.raises(IndexRangeError, match=f"field 'label'.*row 5: {wrong}; the model knows 0 to 2"):
        runtime.fit(X, labels, batch_size=8)
    for name, array in runtime.parameters().items():
        np.testing.assert_array_equal(array, before[name])


def test_tf32_is_off_unless_the_options_say_so(load: Load) -> None:
    seen: list[bool] = []

    def note(module: nn.Module, inputs: object) -> None:
        seen.append(torch.backends.cudnn.allow_tf32)
        assert torch.backends.cuda.matmul.allow_tf32 == seen[-1]

    before = torch.backends.cudnn.allow_tf32
    with nn.modules.module.register_module_forward_pre_hook(note):
        for options, expected in (({}, False), ({"tf32": True}, True)):
            load([("torch", {"device": "cpu", **options})]).predict(X)
            assert set(seen) == {expected}
            seen.clear()
    assert torch.backends.cudnn.allow_tf32 == before
    with pytest.raises(DelegateError, match="tf32 is 0 or 1, not 'maybe'"):
        load([("torch", {"tf32": "maybe"})]).predict(X)


def test_names_of_devices(load: Load) -> None:
    train = preferences("torch:cuda:1")["train"]
    assert (train.delegates[0].name, dict(train.delegates[0].options)) == ("torch", {"device": "cuda:1"})
    assert not train.fallback
    assert preferences([("torch", {"device": "mps"}), "cpu"])["train"].fallback
    with pytest.raises(DelegateError, match=r"'coreml' takes no device"):
        preferences("coreml:0")
    assert find_device("cpu").type == "cpu"
    assert find_device("auto").type in ("cpu", "cuda", "mps")
    for device in ("tpu", "cuda:99"):
        with pytest.raises(DelegateError, match=f"device '{device}'.*name 'cpu', 'cuda'"):
            load(f"torch:{device}").predict(X)
    assert load([f"torch:{device}", "cpu"]).predict(X).shape == (40, 3)
    with pytest.raises(DelegateError, match="no option 'precision'"):
        load([("torch", {"precision": "low"})]).predict(X)


def test_without_pytorch(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(engine_registry, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(MissingExtraError, match=r"torch is not installed.*archipel\[cloud\]"):
        load("torch")
    runtime: Runtime = load(["torch", "cpu"])
    runtime.predict(X)
    [skipped] = runtime.delegate_report().skipped
    assert (skipped.delegate, skipped.reason) == (
        "torch", "the package torch is not installed; install it with: pip install 'archipel[cloud]'"
    )  # fmt: skip


@pytest.mark.slow  # in the short suite an agent's child does this (tests/client/test_torch_engine.py)
@pytest.mark.skipif(sys.platform != "linux", reason="a process with limits is for Linux")
def test_in_a_confined_process(load: Load) -> None:
    expected, found = load("cpu"), load("torch:cpu", isolated=True, memory_limit=64 << 20)
    with found:
        for runtime in (expected, found):
            runtime.fit(X, Y, batch_size=12, seed=3)
        assert found.confinement is not None
        close(found.parameters(), expected.parameters())


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
@pytest.mark.sampled(every=4)
def test_every_kind_of_program(tmp_path: Path, strategy: str) -> None:
    """A frozen backbone's features, `begin` and `finish` with state, mixed with an int8 form that `refresh` makes."""
    torch.manual_seed(0)
    signer = b.generate_key()
    trusted = [signer.public_key().public_bytes_raw()]
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 3))
    trainable = "4.*" if strategy == "fedavg" else "*"
    learning = Training(training.losses.cross_entropy(), training.optimizers.sgd(lr=0.1), batch_size=8,
                        trainable=trainable, strategy=strategy)  # fmt: skip
    convert(network, tmp_path / "m", example=X[:2], training=learning, signing=Signing(signer),
            compression=Compression([StaticInt8()], calibration=(X,)))  # fmt: skip
    labels = np.arange(40) % 3
    algorithm = strategies.get(strategy)
    kept = []
    for delegates in ("cpu", "torch"):
        runtime = lite_runtime.load(tmp_path / "m", trusted, delegates=delegates)
        parameters = runtime.parameters()
        broadcast = {n: a for n, a in algorithm.broadcast(algorithm.init(parameters)).items() if n not in parameters}
        updates = [runtime.local_round(X, labels, seed=seed, broadcast=broadcast) for seed in range(2)]
        runtime.fit(X, labels, batch_size=8, broadcast=broadcast)
        measured = {name: np.array(value) for name, value in runtime.evaluate(X, labels).items()}
        kept.append([*(update.arrays for update in updates), runtime.parameters(), runtime.state.state, measured])
    for expected, found in zip(*kept):
        close(found, expected)
    kinds = {runtime.bundle.program(name).kind for name in runtime.delegate_report().programs}
    assert {"train", "finish", "evaluate", "predict", "refresh"} <= kinds
    assert ("features" if strategy == "fedavg" else "begin") in kinds


@pytest.mark.sampled(every=3)
def test_an_analysis(tmp_path: Path) -> None:
    signer = b.generate_key()
    analysis = Analysis(statistics=[Mean(name="mean", low=-2, high=2)])
    convert(nn.Flatten(), tmp_path / "m", example=X[:2, :1], signing=Signing(signer), analysis=analysis)
    trusted = [signer.public_key().public_bytes_raw()]
    expected, found = (
        lite_runtime.load(tmp_path / "m", trusted, delegates=delegates).analyze({"input": X[:, :1]}, batch_size=16)
        for delegates in ("cpu", "torch")
    )
    close(found[0], expected[0])
    assert found[1] == expected[1] == 40
