"""A version whose int8 `predict` is wrong, while its float parameters are those of the running one, is kept out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from onnx import numpy_helper, parser

from archipel.bundle import PrivacyPolicy, pack
from archipel.client import Agent
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert
from archipel.graph import Model
from archipel.protocol.operator.registry import Gate, RolloutRequest, Stage, VersionRequest
from archipel.training import losses, optimizers
from tests.support.federation import Federation
from tests.support.linear_bundle import POPULATION

MODEL = "classes"
NETWORK = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 8] x) => (float[n, 6] y)
<float[8, 32] w, float[32, 6] v> { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"""
_rng = np.random.default_rng(1)
X, W, V = (_rng.standard_normal(shape).astype(np.float32) for shape in ((60, 8), (8, 32), (32, 6)))
LABELS = (np.maximum(X @ W, 0) @ V).argmax(1)
"""What the network answers, so that a right int8 `predict` has a small loss."""
POLICY = PrivacyPolicy(
    modes=("secure", "plain"), min_cohort=2, threshold=0.6, max_clip=2.0, max_bits=20, colluders=0.0,
    min_contributors=1,
)  # fmt: skip


def _network() -> Model:
    proto = parser.parse_model(NETWORK)
    proto.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in (("w", W), ("v", V)))
    return Model.from_proto(proto)


def _add(federation: Federation, scale: float, promote: bool) -> None:
    """A version of the same network, calibrated on the examples times `scale`."""
    folder = federation.folder / f"version-{scale:g}"
    convert(
        _network(),
        folder,
        name=MODEL,
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.01)),
        compression=Compression([StaticInt8()], calibration=X * np.float32(scale)),
        privacy=POLICY,
        signing=Signing(federation.publisher_key),
        min_snr=-math.inf,
    )
    pack(folder, folder.with_suffix(".bundle"))
    models = federation.operator.models
    models.create(MODEL, POPULATION)
    digest = federation.operator.bundles.upload(folder.with_suffix(".bundle")).digest
    info = models.register(MODEL, VersionRequest(bundle=digest))
    if promote:
        models.promote(MODEL, info.number)


def _devices(federation: Federation, count: int) -> list[Agent]:
    examples = {"x": X, "label": LABELS}
    agents = [federation.agent(n, adopt=True, allow_plain=True, examples=lambda: examples) for n in range(count)]
    for agent in agents:
        agent.run_once()
        assert agent.models == {MODEL: 1}
    return agents


@pytest.mark.sampled(every=4)
def test_a_device_keeps_the_running_version(federation: Federation) -> None:
    _add(federation, 1.0, promote=True)
    [agent] = _devices(federation, 1)
    _add(federation, 1e-3, promote=True)
    agent.run_once()
    assert agent.models == {MODEL: 1}
    [kept] = [dict(event.detail) for event in federation.events if event.name == "kept"]
    assert (kept["version"], kept["runs"], kept["metric"]) == (2, 1, "loss")
    assert "worse by more than 0.05" in str(kept["reason"])


@pytest.mark.sampled(every=4)
def test_a_gate_refuses_it(federation: Federation) -> None:
    _add(federation, 1.0, promote=True)
    agents = _devices(federation, 2)
    _add(federation, 1e-3, promote=False)
    gate = Gate(metric="loss", range=50.0, better="lower", max_loss=0.1, privacy="plain", min_devices=2, max_devices=2,
                seconds=60.0)  # fmt: skip
    operator = federation.operator
    asked = RolloutRequest(model=MODEL, version=2, stages=[Stage(percent=100, soak_seconds=0.5)], gate=gate)
    rollout = operator.rollouts.create(asked)
    federation.run(agents, lambda: operator.rollouts.get(rollout.rollout_id).ended is not None)
    ended = operator.rollouts.get(rollout.rollout_id)
    assert ended.state == "rolled_back"
    assert "of the promoted version" in ended.reason
    assert operator.models.get(MODEL).promoted == 1
