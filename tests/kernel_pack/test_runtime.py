"""Training steps with the kernel pack: the same losses, and a report that says what ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import Model, training
from archipel.bundle import Bundle, Limits
from archipel.converter import Signing, Training, convert
from archipel.converter.limits import compute_limits
from archipel.lite_runtime.engines.kernels import MISSING, KernelPack
from archipel.lite_runtime.runtime import Runtime
from archipel.models import digits_cnn
from archipel.training import StepRunner, losses, optimizers


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_torch(digits_cnn(seed=1), torch.zeros(2, 1, 28, 28))


@pytest.fixture(scope="module")
def bundle(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    options = Training(losses.cross_entropy(), optimizers.sgd(lr=0.1, momentum=0.9), step_options={"kernels": True})
    folder = tmp_path_factory.mktemp("b") / "digits"
    return convert(model, folder, training=options, signing=Signing(Ed25519PrivateKey.generate()))


def batches(count: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.random((size, 1, 28, 28), np.float32), rng.integers(0, 10, size)) for _ in range(count)]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.sampled(every=8)
def test_steps_are_those_of_the_standard_operators(model: Model, steps: int, pack: KernelPack) -> None:
    def runner(**options: bool) -> StepRunner:
        step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1), steps=steps, **options)
        return StepRunner(step)

    plain, native = runner(), runner(kernels=True)
    for start in range(0, 6, steps):
        given = batches(6, 8)[start : start + steps]
        for have, want in zip(native.run(given), plain.run(given)):
            assert have["loss"] == pytest.approx(want["loss"], rel=1e-5)
    for name, value in plain.tensors.items():
        np.testing.assert_allclose(native.tensors[name], value, atol=1e-5, err_msg=name)


@pytest.mark.sampled(every=6)
def test_a_device_says_which_nodes_the_pack_runs(
    bundle: Bundle, pack: KernelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (np.concatenate(arrays) for arrays in zip(*batches(4, 8)))
    losses_of = []
    for installed in (pack, KernelPack(None, MISSING)):
        monkeypatch.setattr("archipel.lite_runtime.engines.sessions.kernel_pack", lambda installed=installed: installed)
        runtime = Runtime(bundle, threads=2)
        losses_of.append(runtime.fit(x, y, epochs=2, batch_size=8, seed=0).losses)
        report = runtime.delegate_report()
        train, predict = report.programs["train"], report.programs.get("predict")
        assert predict is None or predict.kernels == ""
        if installed is pack:
            # Two convolutions (forward, the weight's gradient, and one input's, as images need none) and activations.
            assert (train.kernels, train.native_nodes()) == (pack.title, 8)
            assert f"of them 8 by {pack.title}" in report.table()
            assert report.skipped == ()
        else:
            assert (train.kernels, train.native_nodes()) == ("", 0)
            assert [(each.delegate, each.program, each.reason) for each in report.skipped] == [
                ("kernels", "train", MISSING)
            ]
    np.testing.assert_allclose(losses_of[0], losses_of[1], rtol=1e-5)


def test_a_pack_that_does_not_load_is_left_out(monkeypatch: pytest.MonkeyPatch, bundle: Bundle, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    found = KernelPack(str(broken), "archipel-kernels 0")
    monkeypatch.setattr("archipel.lite_runtime.engines.sessions.kernel_pack", lambda: found)
    runtime = Runtime(bundle)
    runtime.fit(*batches(1, 8)[0], epochs=1, batch_size=8)
    [skipped] = runtime.delegate_report().skipped
    assert skipped.reason.startswith("archipel-kernels 0 cannot be registered: ")


def test_limits_are_those_of_the_standard_operators(model: Model) -> None:
    def limits(**options: bool) -> Limits:
        step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1), **options)
        return compute_limits({"train": step}, 16)

    plain, outlined = limits(), limits(kernels=True)
    assert outlined.flops_per_example == plain.flops_per_example
    assert outlined.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.02)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.LSTM(3, 8, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


@pytest.mark.slow  # inspects, proves and signs a bundle
def test_a_device_trains_an_lstm_with_the_pack(
    pack: KernelPack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Functions whose bodies have loops are inspected, run by the pack or inlined, and train alike."""
    torch.manual_seed(0)
    options = Training(losses.cross_entropy(), optimizers.sgd(lr=0.5), step_options={"kernels": True})
    recurrent = Model.from_torch(Recurrent(), torch.zeros(2, 6, 3))
    made = convert(recurrent, tmp_path / "lstm", training=options, signing=Signing(Ed25519PrivateKey.generate()))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 6, 3), np.float32), rng.integers(0, 4, 40)
    found = []
    for installed in (pack, KernelPack(None, MISSING)):
        monkeypatch.setattr("archipel.lite_runtime.engines.sessions.kernel_pack", lambda installed=installed: installed)
        runtime = Runtime(made, threads=2)
        found.append(runtime.fit(x, y, epochs=3, batch_size=20, seed=0).losses)
        # A loop forwards and one backwards in each of two layers.
        assert runtime.delegate_report().programs["train"].native_nodes() == (4 if installed is pack else 0)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
