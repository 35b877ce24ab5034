"""PyTorch runs the devices' programs as ONNX Runtime does, many at once and one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.bundle import Bundle
from archipel.bundle.roles import Update
from archipel.errors import SimulationError
from archipel.protocol.vector import Layout
from archipel.simulation import SplitClients, simulate
from archipel.simulation.lane_program import open_lane_engine
from archipel.simulation.sums import SecureSum
from tests.support import simulation as reference

Make = Callable[..., Bundle]
ROUNDS = 2


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def clients() -> SplitClients:
    data = reference.clients()
    ends = np.cumsum([len(x) for x, _ in data])
    arrays = {"input": np.concatenate([x for x, _ in data]), "label": np.concatenate([y for _, y in data])}
    # The rows of a client lie apart, so that what is placed on the device has other numbers.
    order = np.random.default_rng(1).permutation(len(arrays["label"]))
    at = np.argsort(order)
    parts = [at[end - len(x) : end] for end, (x, _) in zip(ends, data)]
    return SplitClients({name: array[order] for name, array in arrays.items()}, parts)


def dropping() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, reference.CLASSES)
    )


@pytest.mark.parametrize("axis", ["on", "off"])
@pytest.mark.parametrize(
    ("strategy", "module"),
    [("fedavg", dropping), ("scaffold", reference.dense), ("ditto", reference.dense)],
)
@pytest.mark.sampled(every=6)
def test_the_same_rounds(make: Make, strategy: str, module: Any, axis: str) -> None:
    """Running statistics and Dropout, control variates, and two phases with personal tensors."""
    bundle = make(strategy, module, strategy_options={"clip": 50.0, "bits": 24})
    expected = simulate(bundle, clients(), rounds=ROUNDS, client_axis="off")
    found = simulate(bundle, clients(), rounds=ROUNDS, client_axis=axis, engine="torch:cpu")
    assert found.engine.endswith("as asked for, by torch:cpu")
    assert [row.devices for row in found.history] == [4] * ROUNDS
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[name], value, atol=1e-5, err_msg=name)
    for ours, theirs in zip(found.history, expected.history, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-5)
    for client, row in expected.clients.items():
        assert row.loss is not None
        assert found.clients[client].loss == pytest.approx(row.loss, abs=1e-5)


def test_engines_that_are_not_there(make: Make) -> None:
    bundle = make("fedavg")
    for engine, text in (
        ("jax", "engine: 'jax' is not 'onnxruntime', 'torch', 'torch:cuda:1' or 'openvino'"),
        ("torch:cuda:63", "engine torch: device 'cuda:63': "),
    ):
        with pytest.raises(SimulationError, match=text):
            simulate(bundle, clients(), rounds=1, engine=engine)


@pytest.mark.parametrize("engine", ["cpu", "torch:cpu"])
def test_sums_of_lanes_have_the_bits_of_devices_one_by_one(engine: str) -> None:
    """Weighted values without a clip are cut off at their range times the weight, of some of the lanes."""
    of: dict[str, Any] = {"dtype": "float32", "weighting": "examples", "bits": 16}
    updates = (
        Update(name="change", tensor="w", shape=(3, 5), kind="delta", range=1.0, clip=9.0, **of),
        Update(name="steps", tensor="steps", shape=(4,), kind="value", range=2.0, **of),
        Update(name="weight", tensor="weight", shape=(), kind="weight", range=1.0, lowest=0.01, **of),
    )
    rng = np.random.default_rng(3)
    arrays = {
        "change": rng.normal(0, 0.2, (7, 3, 5)).astype(np.float32),
        "weight": rng.uniform(0.01, 1, 7).astype(np.float32),
    }
    arrays["steps"] = (rng.uniform(-2, 2, (7, 4)).T * arrays["weight"]).T.astype(np.float32)
    arrays["steps"][2] *= 1 + 2e-7  # by its rounding beyond the range times the weight
    chosen = np.array([6, 0, 2, 3])
    one_by_one, at_once = (SecureSum(Layout(updates), 24, 7) for _ in range(2))
    for lane in chosen:
        one_by_one.add({name: array[lane] for name, array in arrays.items()})
    held_by = open_lane_engine(engine, 1)
    held = {name: held_by.hold(array) for name, array in arrays.items()}
    at_once.add_lanes(held, chosen, chosen.tolist(), held_by)
    modulus = np.uint32(2**24 - 1)
    np.testing.assert_array_equal(at_once.total & modulus, one_by_one.total & modulus)
