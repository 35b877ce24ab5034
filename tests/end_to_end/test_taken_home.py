"""PyTorch -> bundle -> a federation's secure rounds -> `archipel task download` -> `archipel export` -> PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from torch import nn

from archipel import bundle as b
from archipel.converter import Signing, Training, convert
from archipel.lite_runtime import Runtime
from archipel.protocol.sealed import public_bytes
from archipel.training import losses, optimizers
from tests.support.commands import Command
from tests.support.federation import Federation
from tests.support.fixtures.commands import archipel  # noqa: F401
from tests.support.fixtures.federation import *  # noqa: F403


class Network(nn.Module):
    """Convolution, BatchNormalization with its counter, PReLU, an LSTM, tied Linear layers, what nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.slope = nn.PReLU(3)
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.mix = nn.Linear(31, 31)
        self.again = nn.Linear(31, 31)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(31, 3)
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.slope(self.norm(self.conv(x))).flatten(1)
        read = self.lstm(x[:, 0])[0][:, -1]
        hidden = torch.tanh(self.mix(torch.cat([seen, read], 1)))
        logits: torch.Tensor = self.head(torch.tanh(self.again(hidden)))
        return logits


def examples(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    y = rng.integers(0, 3, 24)
    x = rng.standard_normal((24, 1, 5, 5)) + 2 + y.reshape(-1, 1, 1, 1)
    return {"x": x.astype(np.float32), "label": y}


def made() -> Network:
    torch.manual_seed(0)
    return Network().eval()


@pytest.mark.sampled(every=8)
def test_there_and_back(archipel: Command, federation: Federation, tmp_path: Path) -> None:  # noqa: F811
    network, folder = made(), tmp_path / "home"
    folder.mkdir()
    bundle = convert(
        network, folder / "m.bundle", example=torch.zeros(2, 1, 5, 5), signing=Signing(federation.publisher_key),
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.1), batch_size=8),
        privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1000.0, max_bits=24,
                                colluders=0.0),
    )  # fmt: skip
    agents = [federation.agent(number, examples=lambda number=number: examples(number)) for number in range(4)]
    task = federation.task(bundle=federation.operator.bundles.upload(folder / "m.bundle").digest, rounds=2)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert federation.wait(task).state == "completed"

    (folder / "token").write_text(federation.operator_token)
    b.save_public_key(federation.publisher_key, folder / "publisher.pub")
    reached = ["--server", federation.url, "--token-file", str(folder / "token")]
    archipel("task", "download", task.task_id, str(folder / "learned.safetensors"), *reached)
    source = [str(folder / "m.bundle"), "--key", str(folder / "publisher.pub")]
    for kind in ("pt", "safetensors", "onnx"):
        archipel("export", *source, "--weights", str(folder / "learned.safetensors"), "-o", str(folder / f"m.{kind}"))

    # What devices answer with the task's weights: the bundle's own programs, and no exported file.
    device, x = Runtime(bundle), examples(9)["x"]
    device.set_parameters(b.read_weights(folder / "learned.safetensors"))
    expected = device.predict(x)
    before = network(torch.from_numpy(x)).detach().numpy()
    assert np.abs(expected - before).max() > 0.1
    for state in (
        torch.load(folder / "m.pt", weights_only=True),
        safetensors.torch.load_file(folder / "m.safetensors"),
    ):
        back = Network().eval()
        back.load_state_dict(state, strict=True)
        np.testing.assert_allclose(back(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-5)
        # The statistics are the federation's: near those of all the devices' convolutions, and not 0 and 1.
        seen = torch.cat([back.conv(torch.from_numpy(examples(number)["x"])) for number in range(4)])
        start = np.abs(seen.mean((0, 2, 3)).detach().numpy())
        away = np.abs((seen.mean((0, 2, 3)) - back.norm.running_mean).detach().numpy())
        assert (away < 0.9 * start).all()
        assert back.again.weight is back.mix.weight
        torch.testing.assert_close(back.unused, network.unused)
    [answer] = onnxruntime.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(answer, expected, atol=1e-5)

    # And on: the file that was exported becomes a bundle that trains.
    again = convert(folder / "m.onnx", folder / "again", training=Training(losses.cross_entropy(), optimizers.sgd()),
                    signing=Signing(federation.publisher_key))  # fmt: skip
    assert {spec.name: spec.shape for spec in again.manifest.parameters} == {
        spec.name: spec.shape for spec in bundle.manifest.parameters
    }
    learner, data = Runtime(again), examples(0)
    np.testing.assert_allclose(learner.predict(x), expected, atol=1e-5)
    learner.fit(data["x"], data["label"], epochs=1, batch_size=8)
    assert np.abs(learner.predict(x) - expected).max() > 1e-3
    assert public_bytes(federation.publisher_key) == again.publisher
