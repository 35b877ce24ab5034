"""What `convert` adds for devices: features of a frozen backbone, several steps at once, self-test vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from archipel import convert, models, training
from archipel.bundle import generate_key, read_weights
from archipel.converter import Signing, Training
from archipel.lite_runtime import load
from archipel.lite_runtime.self_test import run_self_test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """ResNet-8 of which only the last layer is trained."""
    key = generate_key()
    path = tmp_path_factory.mktemp("parts") / "net"
    convert(
        models.resnet8(0), path, example=torch.zeros(2, 3, 32, 32),
        training=Training(training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9), trainable="output.*",
                          step_options={"batch_norm": "frozen"}, batch_size=8),
        signing=Signing(key),
    )  # fmt: skip
    return path, key.public_key().public_bytes_raw()


def data(count: int = 45) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, 3, 32, 32)).astype(np.float32), rng.integers(0, 10, count)


@pytest.mark.sampled(every=4)
def test_programs(folder: tuple[Path, bytes]) -> None:
    manifest = load(folder[0], [folder[1]]).bundle.manifest
    assert set(manifest.programs) == {"predict", "evaluate", "features", "train", "train_8", "refresh", "finish"}
    assert [phase.program for phase in manifest.schedule] == ["train"]
    assert manifest.self_test is not None


@pytest.mark.sampled(every=3)
def test_training_with_and_without_the_cache(folder: tuple[Path, bytes]) -> None:
    x, y = data()
    results = []
    for cached in (True, False):
        rt = load(folder[0], [folder[1]])
        history = rt.fit(x, y, epochs=2, batch_size=4, feature_cache=cached, hyperparameters={"lr": 0.05})
        results.append((history.losses, rt.parameters(), rt.predict(x[:5])))
    (losses, parameters, answers), without = results
    np.testing.assert_allclose(losses, without[0], rtol=1e-6)
    np.testing.assert_allclose(answers, without[2], rtol=1e-5, atol=1e-6)
    for name, array in parameters.items():
        np.testing.assert_allclose(array, without[1][name], rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(every=3)
def test_it_is_pytorchs_training(folder: tuple[Path, bytes]) -> None:
    x, y = data(40)
    net = models.resnet8(0).eval()
    head = [p for name, p in net.named_parameters() if name.startswith("output")]
    optimizer = torch.optim.SGD(head, lr=0.05, momentum=0.9)
    expected = []
    for _ in range(2):
        for first in range(0, 40, 4):
            loss = torch.nn.functional.cross_entropy(
                net(torch.from_numpy(x[first : first + 4])), torch.from_numpy(y[first : first + 4])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    rt = load(folder[0], [folder[1]])
    history = rt.fit(x, y, epochs=2, batch_size=4, shuffle=False, hyperparameters={"lr": 0.05})
    np.testing.assert_allclose(history.losses, expected, rtol=1e-4)


@pytest.mark.sampled(every=4)
def test_the_vectors_hold_no_data_but_what_is_given(folder: tuple[Path, bytes], tmp_path: Path) -> None:
    rt = load(folder[0], [folder[1]])
    report = run_self_test(rt)
    assert report.vectors
    assert report.examples == 4
    key = generate_key()
    x = np.random.default_rng(7).standard_normal((4, 3, 32, 32)).astype(np.float32)
    bundle = convert(
        models.resnet8(0), tmp_path / "b", example=torch.zeros(2, 3, 32, 32), self_test={"input": x},
        signing=Signing(key),
    )  # fmt: skip
    assert bundle.manifest.self_test is not None
    vectors = read_weights(bundle.folder / bundle.manifest.self_test.file)
    np.testing.assert_array_equal(vectors["example/input"], x)
    drawn = read_weights(folder[0] / "self_test.safetensors")["example/input"]
    assert not any(np.array_equal(row, each) for row in drawn for each in x)
