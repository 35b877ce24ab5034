"""Two slots in their ordinary course, and what is not let in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from archipel import bundle as b
from archipel.errors import (
    ArchiveError,
    BundleError,
    RuntimeInputError,
    RuntimeLimitError,
    RuntimeProgramError,
    SelfTestError,
    SignatureError,
    SlotError,
)
from archipel.lite_runtime import DeviceState, load, running_slot
from archipel.lite_runtime.slots.folder import SlotFolder
from archipel.lite_runtime.slots.model_slots import Slots
from tests.support.scaling import SCALE, ScalingModels, X, statuses
from tests.support.text_bundles import BundleMaker, Roles


def test_install_switch_confirm_rollback(model: ScalingModels, trusted: list[bytes], tmp_path: Path) -> None:
    with Slots(tmp_path / "slots", trusted) as slots:
        assert statuses(slots) == ("", "empty", "empty")
        with pytest.raises(SlotError, match="no slot is active; install a bundle"):
            slots.predict(X)
        with pytest.raises(SlotError, match="no slot is staged"):
            slots.switch()
        assert slots.install(model(2)) == "a"
        assert statuses(slots) == ("", "staged", "empty")
        report = slots.switch()
        assert report.vectors
        assert statuses(slots) == ("a", "trying", "empty")
        np.testing.assert_array_equal(slots.predict(X), X * 2)
        slots.confirm()
        assert slots.install(model(3)) == "b"
        assert statuses(slots) == ("a", "good", "staged")
        np.testing.assert_array_equal(slots.predict(X), X * 2)
        slots.switch()
        assert statuses(slots) == ("b", "good", "trying")
        np.testing.assert_array_equal(slots.predict({"x": X})["y"], X * 3)
        assert slots.rollback("the owner disliked it") == "a"
        assert statuses(slots) == ("a", "good", "bad")
        assert slots.state.b.reason == "the owner disliked it"
        np.testing.assert_array_equal(slots.predict(X), X * 2)
        with pytest.raises(SlotError, match=r"nothing to return to: slot b is 'bad' \(the owner disliked it\)"):
            slots.rollback()
        assert slots.install(model(5)) == "b"
        slots.switch()
        slots.confirm()
        assert slots.install(model(3)) == "a"
        assert statuses(slots) == ("b", "staged", "good")
    with Slots(tmp_path / "slots", trusted) as slots:
        assert statuses(slots) == ("b", "staged", "good")
        np.testing.assert_array_equal(slots.predict(X), X * 5)
        slots.switch()
        np.testing.assert_array_equal(slots.predict(X), X * 3)


def test_before_the_first_switch_the_newer_bundle_counts(
    model: ScalingModels, trusted: list[bytes], tmp_path: Path
) -> None:
    with Slots(tmp_path / "slots", trusted) as slots:
        for scale in (2, 3, 5):
            slots.install(model(scale))
        slots.switch()
        np.testing.assert_array_equal(slots.predict(X), X * 5)
        assert statuses(slots) == ("a", "trying", "empty")


def test_a_bundle_file_is_installed_too(running: Slots, model: ScalingModels, tmp_path: Path) -> None:
    b.pack(model(3), tmp_path / "m.bundle")
    running.install(tmp_path / "m.bundle")
    running.switch()
    np.testing.assert_array_equal(running.predict(X), X * 3)


def test_batches_from_an_iterator_follow_a_switch(running: Slots, model: ScalingModels) -> None:
    running.install(model(3))
    answers = running.predict(iter([X, X]))
    np.testing.assert_array_equal(next(answers), X * 2)
    running.switch()
    np.testing.assert_array_equal(next(answers), X * 3)


def test_what_was_learned_stays_with_its_slot(
    running: Slots, model: ScalingModels, trusted: list[bytes], tmp_path: Path
) -> None:
    running.runtime.fit(X, epochs=1, batch_size=2)  # one step of 0.5 down
    running.save()
    np.testing.assert_array_equal(running.predict(X), X * 1.5)
    running.install(model(3))
    running.switch()
    np.testing.assert_array_equal(running.predict(X), X * 3)
    running.rollback()
    np.testing.assert_array_equal(running.predict(X), X * 1.5)
    running.close()
    with Slots(tmp_path / "slots", trusted) as again:
        np.testing.assert_array_equal(again.predict(X), X * 1.5)
        again.install(model(2))
        again.switch()  # the same bundle anew: its published parameters
        np.testing.assert_array_equal(again.predict(X), X * 2)


def test_enough_requests_confirm(model: ScalingModels, trusted: list[bytes], tmp_path: Path) -> None:
    with Slots(tmp_path / "slots", trusted, confirm_after=3) as slots:
        slots.install(model(2))
        slots.switch()
        for expected in ("trying", "trying", "good"):
            slots.predict(X)
            assert slots.state.a.status == expected


@pytest.mark.sampled(every=3)
def test_installed_with_parameters_of_its_own(
    running: Slots, model: ScalingModels, trusted: list[bytes], tmp_path: Path
) -> None:
    w = {"w": np.full(3, 7, np.float32)}
    running.install(model(3), w, version=12, weights="ab" * 32)
    assert running.switch().vectors  # those of the published parameters
    np.testing.assert_array_equal(running.predict(X), X * 7)
    slot = running.state.b
    assert (slot.version, slot.weights, running.state.running) == (12, "ab" * 32, "b")
    np.testing.assert_array_equal(load(running_slot(tmp_path / "slots"), trusted).predict(X), X * 7)
    running.rollback("no")
    assert (running.state.b.version, running.state.running) == (12, "a")
    for wrong in ({}, {"w": np.zeros(4, np.float32)}, {**w, "v": w["w"]}):
        with pytest.raises(RuntimeInputError):
            running.install(model(5), wrong)
    assert running.state.b.version == 12
    running.install(model(3, tested=3.5), w)
    with pytest.raises(SelfTestError, match="deviates"):
        running.switch()
    running.install(model(3), {"w": np.full(3, np.inf, np.float32)})
    with pytest.raises(SelfTestError, match="not finite"):
        running.switch()


def test_what_runs_when_a_model_on_trial_was_given_up(running: Slots, model: ScalingModels, tmp_path: Path) -> None:
    running.install(model(3), version=3)
    running.switch()
    running.close()
    for left, found in ((1, "b"), (0, "a")):
        with SlotFolder(tmp_path / "slots") as folder:
            folder.update("b", msgspec.structs.replace(folder.state.b, attempts=left))
        assert running_slot(tmp_path / "slots").name == found


def test_what_the_device_keeps_elsewhere(
    make_bundle: BundleMaker, r: type[Roles], trusted: list[bytes], tmp_path: Path
) -> None:
    own = DeviceState({"b": np.full(3, 10, np.float32)})
    meaning = {"x": r.example, "w": r.parameter("w"), "b": r.personal("b"), "y": r.output}
    graph = "predict (float[n, 3] x, float[3] w, float[3] b) => (float[n, 3] y) { z = Mul(x, w) \n y = Add(z, b) }"
    first = [{name: np.full(3, value, np.float32)} for name, value in (("w", 2), ("b", 0))]
    bundle = make_bundle({"predict": ("predict", graph, meaning)}, *first)
    with Slots(tmp_path / "slots", trusted, own=lambda bundle: own) as slots:
        slots.install(bundle)
        slots.switch()
        np.testing.assert_array_equal(slots.predict(X), X * 2 + 10)
        own.personal = {"b": np.full(3, 20, np.float32)}
        np.testing.assert_array_equal(slots.predict(X), X * 2 + 10)
        slots.renew()
        np.testing.assert_array_equal(slots.predict(X), X * 2 + 20)
        with pytest.raises(SlotError, match="kept elsewhere"):
            slots.save()
    assert {path.name for path in (tmp_path / "slots").rglob("*")}.isdisjoint({"learned.safetensors"})


def test_bundles_that_are_refused_change_nothing(
    running: Slots, model: ScalingModels, trusted: list[bytes], tmp_path: Path
) -> None:
    before = running.state
    damaged = tmp_path / "damaged"
    shutil.copytree(model(3), damaged)
    (damaged / b.WEIGHTS_FILE).write_bytes(bytes(200))
    (tmp_path / "no.bundle").write_bytes(b"PK")
    for source, error in (
        (damaged, BundleError),
        (tmp_path / "no.bundle", ArchiveError),
        (tmp_path / "?", BundleError),
    ):
        with pytest.raises(error):
            running.install(source)
    running.close()
    with Slots(tmp_path / "slots", trusted, memory_limit=2000) as small:
        with pytest.raises(RuntimeLimitError, match="needs up to 3000 bytes"):
            small.install(model(3, peak_bytes=3000))
        assert small.state == before
        assert sorted(os.listdir(tmp_path / "slots")) == ["a", "lock", "state.json"]
        np.testing.assert_array_equal(small.predict(X), X * 2)


def test_a_stranger_s_bundle(running: Slots, model: ScalingModels, tmp_path: Path) -> None:
    other = b.generate_key().public_key().public_bytes_raw()
    with Slots(tmp_path / "theirs", [other]) as slots, pytest.raises(SignatureError):
        slots.install(model(2))


def test_a_failed_self_test_keeps_the_running_model(running: Slots, model: ScalingModels) -> None:
    running.install(model(3, tested=3.5))
    with pytest.raises(SelfTestError, match="output 'y' deviates"):
        running.switch()
    assert statuses(running) == ("a", "good", "bad")
    assert "deviates" in running.state.b.reason
    np.testing.assert_array_equal(running.predict(X), X * 2)
    with pytest.raises(SlotError, match="no slot is staged"):
        running.switch()


def test_a_graph_that_cannot_be_loaded(running: Slots, model: ScalingModels) -> None:
    running.install(model(3, graph=SCALE.replace("Mul(", 'Einsum <equation = "a,b->"> ('), vectors=False))
    with pytest.raises(RuntimeProgramError):
        running.switch()
    assert statuses(running) == ("a", "good", "bad")
    np.testing.assert_array_equal(running.predict(X), X * 2)


def test_what_is_tried_cannot_lose_its_way_back(running: Slots, model: ScalingModels) -> None:
    running.install(model(3))
    running.switch()
    with pytest.raises(SlotError, match="slot b is still being tried and a is the one to return to"):
        running.install(model(5))
    running.confirm()
    assert running.install(model(5)) == "a"


def test_a_first_model_on_trial_can_be_replaced(model: ScalingModels, trusted: list[bytes], tmp_path: Path) -> None:
    with Slots(tmp_path / "slots", trusted) as slots:
        slots.install(model(2))
        slots.switch()
        slots.install(model(3))
        slots.switch()
        assert statuses(slots) == ("b", "bad", "trying")
        np.testing.assert_array_equal(slots.predict(X), X * 3)
