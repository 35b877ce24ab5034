from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from archipel.bundle import role_of
from archipel.errors import ConversionError
from archipel.protocol.vector import DecodedSum
from archipel.strategies import fedavg
from archipel.strategies.device import LocalTraining, Upload

SHAPES = {"weight": (3, 4), "bias": (3,), "deep.layer.scale": ()}


@pytest.fixture
def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def run_finish(parameters: dict, moved: dict, examples: int, **options: float) -> dict[str, np.ndarray]:
    model, program = fedavg.device(Upload("fedavg", **options)).finish(LocalTraining(parameters))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {}
    for port in program.inputs:
        role = role_of(port)
        if role == "count":
            continue
        feeds[port.name] = np.asarray({"start": parameters, "parameter": moved}[role][port.tensor])
    feeds["fedavg/examples"] = np.array(examples, np.int64)
    names = [port.name for port in program.outputs]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("examples", [0, 7, 50, 5000])
@pytest.mark.parametrize("distance", [0.0, 1e-3, 10.0])
def test_finish_against_the_formula(parameters: dict[str, np.ndarray], examples: int, distance: float) -> None:
    rng = np.random.default_rng(1)
    step = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    moved = {name: (parameters[name] + distance * step[name]).astype(np.float32) for name in SHAPES}
    got = run_finish(parameters, moved, examples, clip=0.5, weight_cap=50)
    delta = {name: moved[name].astype(np.float64) - parameters[name] for name in SHAPES}
    norm = np.sqrt(sum((d**2).sum() for d in delta.values()))
    weight = min(examples, 50) / 50
    assert got["fedavg/weight"] == pytest.approx(weight)
    for name in SHAPES:
        expected = delta[name] * min(1.0, 0.5 / norm if norm else 1.0) * weight
        np.testing.assert_allclose(got[f"{name}.update"], expected, rtol=1e-4, atol=1e-7)


def test_server_half_is_the_weighted_mean(parameters: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(2)
    weights = np.array([0.2, 1.0, 0.7])
    deltas = [{name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in weights]
    total = {name: sum(w * d[name] for w, d in zip(weights, deltas, strict=True)) for name in SHAPES}
    decoded = DecodedSum(deltas=total, values={}, weight=float(weights.sum()))
    moved, state = fedavg.STRATEGY.update(parameters, {}, decoded, 3, {"server_lr": 0.5})
    for name in SHAPES:
        mean = np.average([d[name] for d in deltas], axis=0, weights=weights)
        np.testing.assert_allclose(moved[name], parameters[name] + 0.5 * mean, rtol=1e-5)
        assert moved[name].dtype == np.float32
    assert state == {}


def test_only_float32_is_averaged() -> None:
    with pytest.raises(ConversionError, match="'fedavg': parameter 'a' is float64; only float32"):
        run_finish({"a": np.zeros(2)}, {}, 1)


def test_names_that_collide_are_refused(parameters: dict[str, np.ndarray]) -> None:
    both = {"a": parameters["bias"], "a.start": parameters["bias"]}
    with pytest.raises(ConversionError, match=r"two tensors of finish are called 'a\.start'; rename"):
        run_finish(both, both, 1)
