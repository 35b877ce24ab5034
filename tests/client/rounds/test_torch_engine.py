"""A device whose owner has set `engine = "torch"`, as a hospital's server with a GPU: the same model from the round."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from archipel import engine_registry
from archipel.client import AgentConfig
from archipel.client.settings import load_device_settings
from archipel.errors import ClientError, MissingExtraError
from tests.support.federation import Federation


@pytest.mark.skipif(sys.platform != "linux", reason="child processes with limits need Linux")
@pytest.mark.sampled(every=8)
def test_a_round_ends_with_the_model_of_onnx_runtime(federation: Federation) -> None:
    torch.set_num_threads(1)
    # One in a confined child process, one in this process, one on ONNX Runtime.
    settings = [{"engine": "torch:cpu", "isolated": True}, {"engine": "torch"}, {}]
    agents = [federation.agent(number, patience=60.0, **more) for number, more in enumerate(settings)]
    phases = ("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
    task = federation.task(cohort=3, deadlines=dict.fromkeys(phases, 60.0))
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running", timeout=120)
    assert federation.wait(task).state == "completed"
    [info] = federation.rounds(task)
    start = federation.operator.weights.read(info.weights_in)["w"]
    # Of ONNX Runtime alone, on each device's data.
    expected = federation.expected_weights(start, [(agent, n) for n, agent in enumerate(agents)], task)
    found = federation.operator.weights.read(info.weights_out)["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(found - start).max() > 1e-2


def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation) -> None:
    (tmp_path / "device.toml").write_text('folder = "device"\nengine = "torch:cuda:1"\n')
    config = load_device_settings(tmp_path / "device.toml", environment={}).config
    assert config.delegates == ["torch:cuda:1"]
    assert AgentConfig(folder=tmp_path).delegates == "auto"
    with pytest.raises(ClientError, match=r"engine: 'cuda' is none; choose from onnxruntime, openvino, torch"):
        AgentConfig(folder=tmp_path, engine="cuda")
    real = importlib.util.find_spec
    monkeypatch.setattr(engine_registry, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(MissingExtraError, match=r"archipel\[cloud\]"):
        federation.agent(0, engine="torch")
