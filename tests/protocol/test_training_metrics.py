"""The entries that devices add to a training's update: from the manifest alone, and what a device writes into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.bundle import Bundle, Manifest
from archipel.bundle.roles import Metric, Update
from archipel.bundle.validation import validate_manifest
from archipel.errors import ManifestError, ProtocolError
from archipel.protocol.metrics.training_metrics import metric_ranges, training_arrays
from archipel.protocol.uploads import upload_layout
from archipel.protocol.vector import Layout
from archipel.strategies.strategy import training_layout
from tests.support.fixtures.strategies import make  # noqa: F401

METRICS = {"loss": 0.5, "accuracy": 0.75, "update/clipped": 1.0, "update/capped": 0.0}


@pytest.fixture(scope="module")
def bundle(make: Callable[..., Bundle]) -> Bundle:  # noqa: F811
    return make("fedavg", strategy_options={"bits": 20})


def changed(manifest: Manifest, program: str, **outputs: dict[str, Any]) -> Manifest:
    """The manifest with other fields of some of the program's metrics, checked as when it is opened."""
    old = manifest.programs[program]
    ports = tuple(msgspec.structs.replace(port, **outputs.get(port.name, {})) for port in old.outputs)
    programs = {**manifest.programs, program: msgspec.structs.replace(old, outputs=ports)}
    made = msgspec.structs.replace(manifest, programs=programs)
    validate_manifest(made)
    return made


@pytest.mark.sampled(every=8)
def test_the_entries_follow_those_of_finish(bundle: Bundle) -> None:
    updates = Layout.of(bundle.program("finish")).updates
    entries = upload_layout(bundle.manifest, "training").updates
    assert entries[: len(updates)] == updates
    found = {each.name: (each.range, each.bits, each.weighting) for each in entries[len(updates) :]}
    assert found == {
        "archipel/training/accuracy": (1.0, 20, "examples"),
        "archipel/training/loss": (64.0, 20, "examples"),
        "archipel/clamped/accuracy": (1.0, 20, "examples"),
        "archipel/clamped/loss": (1.0, 20, "examples"),
        "archipel/devices/update/capped": (1.0, 2, "uniform"),
        "archipel/devices/update/clipped": (1.0, 2, "uniform"),
    }
    # No strategy's step, and no bound of one, depends on them.
    assert training_layout(bundle.manifest).updates == updates
    # They make no upload's modulus larger.
    for cohort in (2, 100, 1000):
        assert upload_layout(bundle.manifest, "training").modulus_bits(cohort) == Layout(updates).modulus_bits(cohort)


@pytest.mark.sampled(every=4)
def test_a_device_weighs_means_and_counts_itself(bundle: Bundle) -> None:
    finish = bundle.program("finish")
    update = {port.name: np.zeros(port.shape, np.float32) for port in finish.outputs if isinstance(port, Update)}
    update["fedavg/weight"] = np.array(0.25, np.float32)
    arrays = training_arrays(bundle.manifest, finish, update, {**METRICS, "loss": 80.0})
    assert {name: float(array) for name, array in arrays.items()} == {
        "archipel/training/loss": 16.0,
        "archipel/clamped/loss": 0.25,
        "archipel/training/accuracy": 0.1875,
        "archipel/clamped/accuracy": 0.0,
        "archipel/devices/update/clipped": 1.0,
        "archipel/devices/update/capped": 0.0,
    }
    for name, value in (("loss", float("nan")), ("accuracy", float("inf")), ("update/clipped", 0.5)):
        with pytest.raises(ProtocolError, match=f"metric '{name}': is {value} on this device"):
            training_arrays(bundle.manifest, finish, update, {**METRICS, name: value})


@pytest.mark.sampled(every=6)
def test_metrics_without_a_range_stay_on_the_device(make: Callable[..., Bundle]) -> None:  # noqa: F811
    bundle = make("fedavg", loss_range=None)
    assert any(isinstance(port, Metric) for port in bundle.program("train").outputs)
    assert upload_layout(bundle.manifest, "training") == Layout.of(bundle.program("finish"))


@pytest.mark.sampled(every=3)
def test_noisy_training_reports_nothing(make: Callable[..., Bundle]) -> None:  # noqa: F811
    """Its metrics and counts have no noise: with them the epsilon that each device accounts for would be wrong."""
    bundle = make("dpsgd")
    assert metric_ranges(bundle.manifest) == {}
    assert upload_layout(bundle.manifest, "training") == Layout.of(bundle.program("finish"))
    # No publisher can have it otherwise: a device does not open such a bundle.
    with pytest.raises(ManifestError, match="reads noise, so no metric may have a range"):
        changed(bundle.manifest, "train", loss={"range": 64.0})
    with pytest.raises(ManifestError, match="reads noise, so no metric may have a range"):
        changed(bundle.manifest, "finish", **{"update/clipped": {"range": 1.0}})


@pytest.mark.parametrize(
    ("program", "name", "fields", "said"),
    [
        ("evaluate", "loss", {"range": 8.0}, "only metrics of train and finish have a range, not of evaluate"),
        ("train", "loss", {"range": 0.0}, "range must be above 0 and finite, is 0"),
        ("train", "loss", {"range": float("inf")}, "range must be above 0 and finite, is inf"),
        ("train", "loss", {"reduction": "sum"}, "with a range its reduction must be 'mean', is 'sum'"),
        ("finish", "update/clipped", {"range": 2.0}, "it is 0 or 1 of each device, so its range must be 1, is 2"),
        ("train", "loss", {"range": 8.0}, "another program states another range, or is of another kind"),
    ],
)
def test_a_manifest_with_wrong_ranges_is_refused(
    bundle: Bundle, program: str, name: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ManifestError, match=f"metric '{name}': {said}"):
        changed(bundle.manifest, program, **{name: fields})


def test_a_program_cannot_take_the_name_of_a_device_s_entry(bundle: Bundle) -> None:
    finish = bundle.program("finish")
    taken = msgspec.structs.replace(finish.outputs[0], name="archipel/training/loss")
    programs = {
        **bundle.manifest.programs, "finish": msgspec.structs.replace(finish, outputs=(taken, *finish.outputs[1:])),
    }  # fmt: skip
    with pytest.raises(ProtocolError, match="the name 'archipel/training/loss' is not for programs to use"):
        upload_layout(msgspec.structs.replace(bundle.manifest, programs=programs), "training")
