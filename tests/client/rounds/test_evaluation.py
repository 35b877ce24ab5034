"""A converted model's evaluation over real agents: the metrics are PyTorch's over all their examples together."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from archipel.bundle import PrivacyPolicy, pack
from archipel.bundle.roles import Metric
from archipel.client import Agent
from archipel.converter import Signing, Training, convert
from archipel.errors import RefusedError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.evaluation import evaluation_fields
from archipel.protocol.metrics.measures import measured, measures
from archipel.protocol.operator.results import RoundResult
from archipel.training import losses, optimizers
from tests.support.federation import Federation

SIZES = (7, 30, 1)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def examples(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    count = SIZES[number]
    return {"input": rng.standard_normal((count, 4), np.float32), "label": rng.integers(0, 3, count)}


@pytest.fixture
def fleet(federation: Federation, network: nn.Module) -> tuple[Federation, list[Agent]]:
    made = convert(
        network, federation.folder / "net", example=torch.zeros(2, 4),
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.1), strategy="fedavg"),
        privacy=PrivacyPolicy(
            modes=("secure", "plain"), min_cohort=2, threshold=0.6, max_clip=10.0, max_bits=20, colluders=0.0,
            min_contributors=1,
        ),
        signing=Signing(federation.publisher_key),
    )  # fmt: skip
    pack(federation.folder / "net", federation.folder / "net.bundle")
    federation.bundle_file = federation.folder / "net.bundle"
    fields = [port.name for port in evaluation_fields(made)]

    def data(number: int) -> dict[str, np.ndarray]:
        return dict(zip(fields, examples(number).values(), strict=True))

    agents = [
        federation.agent(number, allow_plain=True, examples=lambda number=number: data(number)) for number in range(3)
    ]
    return federation, agents


def evaluate(federation: Federation, agents: list[Agent], metrics: dict[str, float], privacy: str) -> RoundResult:
    task = federation.task(kind="evaluation", metrics=metrics, privacy=privacy, threshold=None, cohort=3, min_cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    [info] = federation.rounds(task)
    assert info.phase == "committed", info
    assert info.result is not None
    return info.result


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=8)
def test_loss_and_accuracy_are_those_of_all_examples_together(
    fleet: tuple[Federation, list[Agent]], network: nn.Module, privacy: str
) -> None:
    result = evaluate(*fleet, {"loss": 8.0, "accuracy": 1.0}, privacy)
    all_of = [np.concatenate([examples(number)[key] for number in range(3)]) for key in ("input", "label")]
    x, y = (torch.from_numpy(each) for each in all_of)
    with torch.no_grad():
        logits = network(x)
    assert result.metrics["loss"] == pytest.approx(float(functional.cross_entropy(logits, y)), rel=5e-3)
    assert result.metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == y).float().mean()), rel=5e-3)
    assert (result.devices, result.clamped) == (3, {})
    assert result.examples == pytest.approx(sum(SIZES), abs=0.01)


@pytest.mark.sampled(every=4)
def test_devices_tell_how_long_a_prediction_takes(
    fleet: tuple[Federation, list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    predict, asked = Runtime.predict, list[dict[str, np.ndarray]]()

    def slow(runtime: Runtime, fields: dict[str, np.ndarray], **rest: Any) -> Any:
        asked.append(fields)
        time.sleep(0.03)
        return predict(runtime, fields, **rest)

    monkeypatch.setattr(Runtime, "predict", slow)
    result = evaluate(*fleet, {"loss": 8.0, "predict_ms": 1000.0}, "secure")
    assert 30 <= result.metrics["predict_ms"] < 200
    assert set(result.metrics) == {"loss", "predict_ms"}
    # One example of the device's own, as often as it was measured.
    owned = [examples(number)["input"][:1].tobytes() for number in range(3)]
    assert {fields["input"].tobytes() for fields in asked} == set(owned)


@pytest.mark.slow
def test_devices_count_themselves_in_bins(fleet: tuple[Federation, list[Agent]], network: nn.Module) -> None:
    federation, agents = fleet
    data = [{"input": examples(1)["input"][n::10], "label": examples(1)["label"][n::10]} for n in range(7)]
    agents += [
        federation.agent(3 + number, allow_plain=True, examples=lambda each=each: each)
        for number, each in enumerate(data)
    ]
    task = federation.task(
        kind="evaluation", metrics={"loss": 8.0, "accuracy": 1.0}, distributions={"loss": "default"}, cohort=10,
        min_cohort=10, privacy="plain", threshold=None,
    )  # fmt: skip
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    [info] = federation.rounds(task)
    assert info.result is not None, info.reason
    found = info.result.distributions["loss"]
    with torch.no_grad():
        values = [
            float(functional.cross_entropy(network(torch.from_numpy(each["input"])), torch.from_numpy(each["label"])))
            for each in [*(examples(number) for number in range(3)), *data]
        ]
    assert found.counts[1:-1] == np.histogram(values, found.edges)[0].tolist()
    assert sum(found.counts) == found.devices == 10
    assert abs(found.mean.value - np.mean(values)) <= (found.mean.error or 0)


@pytest.mark.sampled(every=4)
def test_it_is_told_how_much_was_beyond_the_range(fleet: tuple[Federation, list[Agent]], network: nn.Module) -> None:
    with torch.no_grad():
        means = [
            float(functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(y)))
            for x, y in (examples(number).values() for number in range(3))
        ]
    bound = float(np.mean(sorted(means)[-2:]))  # one device's loss is above it
    beyond = sum(size for size, mean in zip(SIZES, means) if mean > bound) / sum(SIZES)
    result = evaluate(*fleet, {"loss": bound, "accuracy": 1.0}, "plain")
    assert result.clamped == {"loss": pytest.approx(beyond, rel=1e-3)}


@pytest.mark.sampled(every=4)
def test_what_can_be_asked_for_is_named(fleet: tuple[Federation, list[Agent]]) -> None:
    federation, _ = fleet
    with pytest.raises(RefusedError, match=r"metric 'correct': .* computes \['accuracy', 'loss', 'predict_ms'\]"):
        federation.task(kind="evaluation", metrics={"correct": 1.0})


def port(name: str, reduction: str) -> Metric:
    return Metric(name=name, dtype="float32", shape=(), reduction=reduction)  # type: ignore[arg-type]


def test_sums_are_divided_by_the_labels_that_count() -> None:
    class Program:
        outputs = (port("loss", "sum"), port("correct", "sum"), port("count", "sum"), port("f1", "mean"))

    program: Any = Program()
    assert measures(program) == {"loss": "loss", "accuracy": "correct", "f1": "f1"}
    found = {"loss": 12.0, "correct": 3.0, "count": 4.0, "f1": 0.25}
    assert measured(program, found, 9).values == {"loss": 3.0, "accuracy": 0.75, "f1": 0.25}
    assert measured(program, found, 9).count == 4
    # Nothing that counts: no part in the mean, instead of a division by nothing.
    assert measured(program, {**found, "count": 0.0}, 9).count == 0
    assert measured(program, {}, 0).values == {}


def test_without_a_count_the_examples_are_what_counts() -> None:
    class Program:
        outputs = (port("squares", "sum"), port("accuracy", "mean"), port("correct", "sum"))

    program: Any = Program()
    assert measures(program) == {"squares": "squares", "accuracy": "accuracy", "correct": "correct"}
    assert measured(program, {"squares": 9.0, "accuracy": 0.5, "correct": 3.0}, 3).values == {
        "squares": 3.0, "accuracy": 0.5, "correct": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.sampled(every=8)
def test_a_label_out_of_range_is_named_to_the_owner_and_to_nobody_else(
    fleet: tuple[Federation, list[Agent]], kind: str
) -> None:
    """The others go on without the device. The server is told that the examples do not fit, and not why."""
    federation, agents = fleet

    def wrong() -> dict[str, np.ndarray]:
        data = examples(1)
        data["label"][5] = 3
        return data

    agents.append(federation.agent(3, allow_plain=True, examples=wrong))
    metrics = {"metrics": {"loss": 16.0}} if kind == "evaluation" else {}
    task = federation.task(kind=kind, cohort=4, min_cohort=3, threshold=3, **metrics)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    [info] = federation.rounds(task)
    assert (info.phase, info.refused) == ("committed", {"data": 1})
    [entry] = agents[3].rounds
    assert "field 'label' has a class number that the model does not have, in row 5: 3; the model knows 0 to 2" in (
        entry.reason
    )
    assert not [each for each in federation.operator.audit.list() if "row 5" in str(each)]
