"""A cohort's sum against the local rounds of its clients one by one on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from archipel import bundle as b
from archipel import strategies
from archipel.bundle import Bundle
from archipel.bundle.roles import Step
from archipel.converter import Signing, Training, convert
from archipel.errors import IndexRangeError, TrainingError
from archipel.lite_runtime import DeviceState, Runtime
from archipel.training import losses, optimizers
from archipel.training.cloud.programs.cohort import Cohort, CohortUpdate

# Fewer than a batch, several batches with a smaller last one, whole batches.
SIZES = (3, 10, 8, 17, 4)
SEEDS = (5, 0, 2**32 - 1, 7, 9)
Arrays = dict[str, np.ndarray]
Make = Callable[..., Bundle]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(network: nn.Module, **options: Any) -> Bundle:
        key = b.generate_key()
        learning = Training(losses.cross_entropy(), epochs=2, batch_size=4, **options)
        example = np.zeros((2, 6), np.float32)
        convert(network.eval(), tmp_path / "made", example=example, training=learning, signing=Signing(key))
        return b.open_bundle(tmp_path / "made", [key.public_key().public_bytes_raw()])

    torch.manual_seed(1)
    return make


def data() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((size, 6), np.float32), rng.integers(0, 3, size)) for size in SIZES]


def one_by_one(bundle: Bundle, states: list[DeviceState], **options: Any) -> CohortUpdate:
    total: Arrays = {}
    result = CohortUpdate(total)
    for (x, y), seed, state in zip(data(), SEEDS, states):
        update = Runtime(bundle, state=state).local_round(x, y, seed=seed, **options)
        for name, array in update.arrays.items():
            total[name] = total.get(name, 0) + array
        result.losses.append(update.losses)
        result.examples += update.examples
    return result


def check(found: CohortUpdate, expected: CohortUpdate) -> None:
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_allclose(found.arrays[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    assert (found.examples, found.left_out) == (expected.examples, ())
    for ours, theirs in zip(found.losses, expected.losses, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(every=4)
def test_normalization_dropout_and_adam(make: Make) -> None:
    layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)]
    bundle = make(nn.Sequential(*layers), optimizer=optimizers.adam(lr=0.01))
    expected = one_by_one(bundle, [DeviceState() for _ in SIZES])
    check(Cohort(bundle, "cpu").local_rounds(data(), SEEDS), expected)
    # In groups of two, the last of one.
    check(Cohort(bundle, "cpu", lanes=2).local_rounds(data(), SEEDS), expected)
    assert len({tuple(each) for each in expected.losses}) == len(SIZES)


@pytest.mark.sampled(every=3)
def test_convolutions(make: Make) -> None:
    """Gradients that PyTorch has a function for, and convolutions with weights of each lane."""
    layers = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(4, 3, 2)]
    bundle = make(nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)), optimizer=optimizers.sgd(lr=0.1))
    expected = one_by_one(bundle, [DeviceState() for _ in SIZES])
    check(Cohort(bundle, "cpu").local_rounds(data(), SEEDS), expected)


@pytest.mark.sampled(every=3)
def test_features_of_a_frozen_backbone(make: Make) -> None:
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)]
    bundle = make(nn.Sequential(*layers), optimizer=optimizers.sgd(lr=0.1), trainable="4.*")
    assert "features" in bundle.manifest.programs
    expected = one_by_one(bundle, [DeviceState() for _ in SIZES])
    check(Cohort(bundle, "cpu").local_rounds(data(), SEEDS), expected)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("strategy", ["scaffold", pytest.param("ditto", marks=pytest.mark.slow)])
def test_what_devices_keep_from_round_to_round(make: Make, strategy: str) -> None:
    """Control variates, and models of their own in a phase of their own."""
    bundle = make(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), optimizer=optimizers.sgd(lr=0.1),
                  strategy=strategy)  # fmt: skip
    algorithm = strategies.get(strategy)
    broadcast = algorithm.broadcast(algorithm.init(bundle.parameters()))
    more = {"broadcast": {name: broadcast[name] for name in broadcast if name not in bundle.parameters()}}
    states, theirs = ([DeviceState() for _ in SIZES] for _ in range(2))
    cohort = Cohort(bundle, "cpu")
    for _ in range(2):
        check(cohort.local_rounds(data(), SEEDS, states=states, **more), one_by_one(bundle, theirs, **more))
    for ours, other in zip(states, theirs):
        for kept, wanted in ((ours.state, other.state), (ours.personal, other.personal)):
            assert kept.keys() == wanted.keys()
            for name, array in wanted.items():
                np.testing.assert_allclose(kept[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    assert states[0].state or states[0].personal


@pytest.mark.sampled(every=3)
def test_a_part_of_the_round_that_trains_nothing(make: Make) -> None:
    """It measures the received model: its state counts for the update."""
    bundle = make(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), optimizer=optimizers.sgd(lr=0.1),
                  strategy="qfedavg")  # fmt: skip
    expected = one_by_one(bundle, [DeviceState() for _ in SIZES])
    check(Cohort(bundle, "cpu").local_rounds(data(), SEEDS), expected)


@pytest.mark.sampled(every=3)
def test_a_second_phase_begins_at_a_step_of_each_client(make: Make) -> None:
    """Dropout draws by the number of the step, which goes on from phase to phase; clients with more data make more."""
    layers = [nn.Linear(6, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)]
    bundle = make(nn.Sequential(*layers), optimizer=optimizers.sgd(lr=0.1))
    assert any(isinstance(port, Step) for port in bundle.program("train").inputs)
    phases = (*bundle.manifest.schedule, b.Phase(program="train", batch_size=8, epochs=1, moves=("3.weight", "3.bias")))
    bundle.manifest = msgspec.structs.replace(bundle.manifest, schedule=phases)
    expected = one_by_one(bundle, [DeviceState() for _ in SIZES])
    assert len({len(each) for each in expected.losses}) > 2
    check(Cohort(bundle, "cpu", lanes=3).local_rounds(data(), SEEDS), expected)


@pytest.mark.sampled(every=3)
def test_a_client_whose_update_is_not_finite_is_left_out(make: Make) -> None:
    bundle = make(nn.Linear(6, 3), optimizer=optimizers.sgd(lr=0.1))
    clients = data()
    clients[1] = (np.full((10, 6), np.inf, np.float32), clients[1][1])
    found = Cohort(bundle, "cpu").local_rounds(clients, SEEDS)
    assert (found.left_out, found.examples) == ((1,), sum(SIZES) - 10)
    del clients[1]
    without = Cohort(bundle, "cpu").local_rounds(clients, SEEDS[:1] + SEEDS[2:])
    for name, array in without.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(every=3)
def test_mistakes(make: Make) -> None:
    bundle = make(nn.Linear(6, 3), optimizer=optimizers.sgd(lr=0.1))
    with pytest.raises(TrainingError, match="device 'tpu'"):
        Cohort(bundle, "tpu")
    with pytest.raises(TrainingError, match="lanes must be at least 1"):
        Cohort(bundle, "cpu", lanes=0)
    cohort = Cohort(bundle, "cpu")
    with pytest.raises(TrainingError, match="5 clients need as many seeds and states, got 4 seeds"):
        cohort.local_rounds(data(), SEEDS[1:])
    clients = data()
    clients[2][1][0] = 3
    with pytest.raises(IndexRangeError, match=r"client 2: field 'label' has a class number .*row 0: 3; .*0 to 2"):
        cohort.local_rounds(clients, SEEDS)
