"""The mode "eager" on devices and in step graphs: bundles run node by node, and a fault names its node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, lite_runtime
from archipel import bundle as b
from archipel.converter import Signing, Training, convert
from archipel.errors import NotANumberError
from archipel.mode import in_mode, set_mode
from archipel.training import StepRunner, losses, optimizers, step_graph

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 4), np.float32), RNG.standard_normal((16, 2), np.float32)


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    yield
    set_mode("graph")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()


@pytest.mark.sampled(every=4)
def test_a_bundle_runs_node_by_node(tmp_path: Path) -> None:
    signer = b.generate_key()
    learning = Training(losses.mse(), optimizers.sgd(), batch_size=8)
    convert(network(), tmp_path / "m.bundle", example=X[:2], training=learning, signing=Signing(signer))
    trusted = [signer.public_key().public_bytes_raw()]
    whole = lite_runtime.load(tmp_path / "m.bundle", trusted, cache=tmp_path / "cache")
    expected = whole.predict(X)
    whole.fit(X, Y, epochs=1, seed=0)
    with in_mode("eager"):
        stepped = lite_runtime.load(tmp_path / "m.bundle", trusted, cache=tmp_path / "cache")
        np.testing.assert_allclose(stepped.predict(X), expected, rtol=1e-5, atol=1e-6)
        stepped.fit(X, Y, epochs=1, seed=0)
        for name, array in whole.parameters().items():
            np.testing.assert_allclose(stepped.parameters()[name], array, rtol=1e-5, atol=1e-6)
        assert stepped.delegate_report().programs["predict"].delegates == ("torch",)
        with pytest.raises(NotANumberError, match=r"^Gemm '.*' has computed NaN in '.*', in 16 of 16 elements$"):
            stepped.predict(np.where(np.arange(4) == 1, np.nan, X[:2]).astype(np.float32))


@pytest.mark.sampled(every=6)
def test_a_step_runs_node_by_node() -> None:
    step = step_graph(Model.from_torch(network(), torch.zeros(2, 4)), losses.mse(), optimizers.sgd(lr=0.1))
    whole = StepRunner(step)
    whole.step((X, Y))
    with in_mode("eager"):
        stepped = StepRunner(step)
        stepped.step((X, Y))
        for name, array in whole.tensors.items():
            np.testing.assert_allclose(stepped.tensors[name], array, rtol=1e-5, atol=1e-6)
        with pytest.raises(NotANumberError, match="has computed NaN in"):
            stepped.step((np.full_like(X, np.nan), Y))
