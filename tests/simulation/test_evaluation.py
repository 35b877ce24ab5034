"""Devices that measure the model, each on examples of its own: what they measure, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import archipel
from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.protocol.messages.distributions import Bins
from archipel.simulation import Evaluation, ListedClients, SplitClients
from archipel.simulation.evaluation import hold_out_each
from tests.simulation.test_engines import bundle_of, fields
from tests.support import simulation as reference

Make = Callable[..., Bundle]


def measured_by_pytorch(weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Accuracy and mean cross entropy in float64."""
    tensors = {name: torch.tensor(np.asarray(array, np.float64)) for name, array in weights.items()}
    logits = torch.func.functional_call(reference.dense().double(), tensors, (torch.tensor(x, dtype=torch.float64),))
    labels = torch.tensor(y)
    return float((logits.argmax(1) == labels).double().mean()), float(torch.nn.functional.cross_entropy(logits, labels))


@pytest.mark.parametrize("form", [ListedClients, SplitClients])
def test_each_device_s_examples_are_divided_once(form: type) -> None:
    if form is ListedClients:
        clients: ListedClients | SplitClients = ListedClients(fields())
    else:
        arrays = {name: np.concatenate([each[name] for each in fields()]) for name in ("input", "label")}
        ends = np.cumsum(reference.SIZES)
        clients = SplitClients(arrays, [np.arange(end - size, end) for size, end in zip(reference.SIZES, ends)])
    rest, held = hold_out_each(clients, 0.3, seed=4)
    assert [held.count(number) for number in range(4)] == [2, 3, 4, 6]  # 30% of 7, 11, 15, 19, rounded
    for number in range(4):
        assert rest.count(number) + held.count(number) == reference.SIZES[number]
        both = np.concatenate([rest.take(number)["input"], held.take(number)["input"]])
        whole = fields()[number]["input"]
        np.testing.assert_array_equal(both[np.lexsort(both.T)], whole[np.lexsort(whole.T)])
    # The same rows in whatever form the clients are.
    listed = hold_out_each(ListedClients(fields()), 0.3, seed=4)[1]
    for number in range(4):
        np.testing.assert_array_equal(held.take(number)["input"], listed.take(number)["input"])
    others = hold_out_each(clients, 0.3, seed=5)[1]
    assert any(not np.array_equal(held.take(n)["label"], others.take(n)["label"]) for n in range(4))


@pytest.mark.parametrize("strategy", ["fedavg", "fedper"])
@pytest.mark.sampled(every=4)
def test_devices_measure_what_pytorch_measures_on_their_own_model(make: Make, strategy: str, tmp_path: Path) -> None:
    bundle = bundle_of(make, strategy)
    asked = Evaluation(hold_out=0.3, every=2)
    found = archipel.simulate(bundle, fields(), rounds=5, cohort=2, evaluation=asked, client_axis="off")
    kept = archipel.simulate(
        bundle, fields(), rounds=5, cohort=2, evaluation=asked, client_axis="off", folder=tmp_path / "run"
    )
    assert [bool(row.spread) for row in found.history] == [False, True, False, True, True]
    rest, held = hold_out_each(ListedClients(fields()), 0.3, 0)
    # The same rounds without evaluation leave the model, and the devices' heads, that the last evaluation measured.
    archipel.simulate(
        bundle, [rest.take(n) for n in range(4)], rounds=5, cohort=2, client_axis="off", folder=tmp_path / "plain"
    )
    from archipel.simulation.states import StateFolder

    states = StateFolder(tmp_path / "plain" / "states")
    accuracies, losses = [], []
    for number in range(4):
        own = states.load(number, 6).personal
        assert bool(own) == (strategy == "fedper")
        taken = held.take(number)
        weights = {**found.parameters, **own}
        accuracy, loss = measured_by_pytorch(weights, taken["input"], taken["label"])  # type: ignore[arg-type]
        row = found.clients[number]
        assert row.test_examples == len(taken["label"])
        assert row.tested["accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert row.tested["loss"] == pytest.approx(loss, rel=1e-5)
        accuracies.append(accuracy)
        losses.append(loss)
    last = found.history[-1]
    spread = last.spread["loss"]
    np.testing.assert_allclose(
        [each.value for each in spread.deciles], np.quantile(losses, np.arange(1, 10) / 10), 1e-5
    )
    assert spread.worst.value == pytest.approx(max(losses), rel=1e-5)
    assert last.spread["accuracy"].worst.value == pytest.approx(min(accuracies), abs=1e-6)
    told = last.binned["loss"]
    assert told.counts == spread.counts
    assert told.mean.error is not None
    assert abs(told.mean.value - np.mean(losses)) <= told.mean.error
    assert kept.history[-1].spread == last.spread
    assert kept.clients == found.clients
    kept.plot(tmp_path / "curves.svg")
    # Labels of a picture are drawn as paths, named in comments.
    assert "devices' loss, worst 10%" in (tmp_path / "curves.svg").read_text()
    kept.to_parquet(tmp_path / "rounds.parquet")
    table = pq.read_table(tmp_path / "rounds-clients.parquet").to_pydict()
    assert table["test accuracy"] == [found.clients[number].tested["accuracy"] for number in range(4)]
    assert pq.read_table(tmp_path / "rounds.parquet").to_pydict()["loss worst 10%"][-1] == spread.worst.value


@pytest.mark.sampled(every=3)
def test_examples_held_out_by_the_caller_and_some_of_the_devices(make: Make) -> None:
    bundle = bundle_of(make, "fedavg")
    own = [{name: array[:1] for name, array in each.items()} for each in fields()]
    asked = Evaluation(devices=2, bins={"loss": Bins(low=0.1, high=10.0, count=5, scale="log", better="lower")})
    found = archipel.simulate(bundle, fields(), rounds=2, held_out=own, evaluation=asked, client_axis="off")
    for row in found.history:
        assert row.spread["accuracy"].devices == 2
        assert len(row.spread["loss"].counts) == 7
    measured = {number for number, row in found.clients.items() if row.test_examples}
    assert len(measured) == 2
    # Nothing was held out of what they train with.
    assert [found.clients[number].examples for number in range(4)] == list(reference.SIZES)


@pytest.mark.sampled(every=3)
def test_what_cannot_be_evaluated_is_told(make: Make) -> None:
    bundle = bundle_of(make, "fedavg")
    with pytest.raises(SimulationError, match=r"hold_out: 1\.0 is not above 0 and below 1"):
        Evaluation(hold_out=1.0)
    with pytest.raises(SimulationError, match="every: 0 is not a whole number of 1 or more"):
        Evaluation(every=0)
    with pytest.raises(SimulationError, match=r"evaluation\.bins\.f1: the model measures accuracy, loss"):
        archipel.simulate(bundle, fields(), rounds=1, evaluation=Evaluation(bins={"f1": Bins(low=0.0, high=1.0)}))
    single = [{name: array[:1] for name, array in each.items()} for each in fields()]
    with pytest.raises(SimulationError, match="no device has an example to be measured on"):
        archipel.simulate(bundle, single, rounds=1, evaluation=Evaluation())
    with pytest.raises(SimulationError, match="held_out: has the examples of 3 clients, and there are 4"):
        archipel.simulate(bundle, fields(), rounds=1, held_out=fields()[:3])
