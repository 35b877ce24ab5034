from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from archipel.lite_runtime.slot_folder import SlotFolder
from archipel.lite_runtime.slots import Slots

X = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], np.float32)
SCALE = "predict (float[n, 3] x, float[3] w) => (float[n, 3] y) { y = Mul(x, w) }"
LOG = "predict (float[n, 3] x, float[3] w) => (float[n, 3] y) { q = Add(x, w) \n y = Log(q) }"
# Fails in the runtime, not before, for a batch that has another number of rows than 2 (and no vectors need it).
TWO_ROWS = """predict (float[n, 3] x, float[3] w) => (float[n, 3] y)
  <int64[2] shape = {2, 3}> { z = Mul(x, w) \n y = Reshape(z, shape) }"""
LEARN = """train (float[n, 3] x, float[3] w, float lr) => (float[3] w_new, float loss) {
    w_new = Sub(w, lr)
    loss = ReduceMean <keepdims = 0> (x)
}"""

MakeModel = Callable[..., Path]


@pytest.fixture
def trusted(key: Any) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


@pytest.fixture
def model(make_bundle: Callable[..., Path], r: Any, key: Any, tmp_path: Path) -> MakeModel:
    """A bundle that multiplies by `factor`, with vectors that say so (or say something else)."""
    made: dict[Any, Path] = {}

    def make(factor: float, graph: str = SCALE, vectors: bool = True, tested: float | None = None, **more: Any) -> Path:
        at = (factor, graph, vectors, tested, *more.items())
        if at in made:
            return made[at]
        w = r.parameter("w")
        programs = {
            "predict": ("predict", graph, {"x": r.example, "w": w, "y": r.output}),
            "train": ("train", LEARN, {"x": r.example, "w": w, "lr": r.hyper(0.5), "w_new": w, "loss": r.metric()}),
        }
        folder = make_bundle(programs, {"w": np.full(3, factor, np.float32)}, **more)
        if vectors:
            old = b.open_bundle(folder, [key.public_key().public_bytes_raw()])
            y = X * np.float32(factor if tested is None else tested)
            target = tmp_path / f"tested-{len(made)}"
            b.write_bundle(
                target,
                name=f"times {factor:g}",
                programs=old.manifest.programs,
                graphs={p.file: (folder / p.file).read_bytes() for p in old.manifest.programs.values()},
                weights=(folder / b.WEIGHTS_FILE).read_bytes(),
                parameters=old.manifest.parameters,
                limits=old.manifest.limits,
                privacy=old.manifest.privacy,
                key=key,
                self_test=(
                    b.SelfTest(file="t.safetensors", rtol=1e-6, atol=0.0),
                    b.write_weights({"example/x": X, "output/y": y}),
                ),
            )
            folder = target
        made[at] = folder
        return folder

    return make


@pytest.fixture
def running(model: MakeModel, trusted: list[bytes], tmp_path: Path) -> Any:
    """Slots with "times 2" good and active in slot a."""
    with Slots(tmp_path / "slots", trusted, confirm_after=None) as slots:
        slots.install(model(2))
        slots.switch()
        slots.confirm()
        yield slots


def statuses(slots: Slots) -> tuple[str, str, str]:
    return slots.state.active, slots.state.a.status, slots.state.b.status


# --- the ordinary course ------------------------------------------------------------------------------------------


def test_install_switch_confirm_rollback(model: MakeModel, trusted: list[bytes], tmp_path: Path) -> None:
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


def test_a_bundle_file_is_installed_too(running: Slots, model: MakeModel, tmp_path: Path) -> None:
    b.pack(model(3), tmp_path / "m.bundle")
    running.install(tmp_path / "m.bundle")
    running.switch()
    np.testing.assert_array_equal(running.predict(X), X * 3)


def test_batches_from_an_iterator_follow_a_switch(running: Slots, model: MakeModel) -> None:
    running.install(model(3))
    answers = running.predict(iter([X, X]))
    np.testing.assert_array_equal(next(answers), X * 2)
    running.switch()
    np.testing.assert_array_equal(next(answers), X * 3)


def test_what_was_learned_stays_with_its_slot(
    running: Slots, model: MakeModel, trusted: list[bytes], tmp_path: Path
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


def test_enough_requests_confirm(model: MakeModel, trusted: list[bytes], tmp_path: Path) -> None:
    with Slots(tmp_path / "slots", trusted, confirm_after=3) as slots:
        slots.install(model(2))
        slots.switch()
        for expected in ("trying", "trying", "good"):
            slots.predict(X)
            assert slots.state.a.status == expected


def test_installed_with_parameters_of_its_own(
    running: Slots, model: MakeModel, trusted: list[bytes], tmp_path: Path
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


def test_what_runs_when_a_model_on_trial_was_given_up(running: Slots, model: MakeModel, tmp_path: Path) -> None:
    running.install(model(3), version=3)
    running.switch()
    running.close()
    for left, found in ((1, "b"), (0, "a")):
        with SlotFolder(tmp_path / "slots") as folder:
            folder.update("b", msgspec.structs.replace(folder.state.b, attempts=left))
        assert running_slot(tmp_path / "slots").name == found


def test_what_the_device_keeps_elsewhere(make_bundle: Any, r: Any, trusted: list[bytes], tmp_path: Path) -> None:
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


# --- what is not let in -------------------------------------------------------------------------------------------


def test_bundles_that_are_refused_change_nothing(
    running: Slots, model: MakeModel, trusted: list[bytes], tmp_path: Path
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


def test_a_stranger_s_bundle(running: Slots, model: MakeModel, tmp_path: Path) -> None:
    other = b.generate_key().public_key().public_bytes_raw()
    with Slots(tmp_path / "theirs", [other]) as slots, pytest.raises(SignatureError):
        slots.install(model(2))


def test_a_failed_self_test_keeps_the_running_model(running: Slots, model: MakeModel) -> None:
    running.install(model(3, tested=3.5))
    with pytest.raises(SelfTestError, match="output 'y' deviates"):
        running.switch()
    assert statuses(running) == ("a", "good", "bad")
    assert "deviates" in running.state.b.reason
    np.testing.assert_array_equal(running.predict(X), X * 2)
    with pytest.raises(SlotError, match="no slot is staged"):
        running.switch()


def test_a_graph_that_cannot_be_loaded(running: Slots, model: MakeModel) -> None:
    running.install(model(3, graph=SCALE.replace("Mul(", 'Einsum <equation = "a,b->"> ('), vectors=False))
    with pytest.raises(RuntimeProgramError):
        running.switch()
    assert statuses(running) == ("a", "good", "bad")
    np.testing.assert_array_equal(running.predict(X), X * 2)


def test_what_is_tried_cannot_lose_its_way_back(running: Slots, model: MakeModel) -> None:
    running.install(model(3))
    running.switch()
    with pytest.raises(SlotError, match="slot b is still being tried and a is what to return to"):
        running.install(model(5))
    running.confirm()
    assert running.install(model(5)) == "a"


def test_a_first_model_on_trial_can_be_replaced(model: MakeModel, trusted: list[bytes], tmp_path: Path) -> None:
    with Slots(tmp_path / "slots", trusted) as slots:
        slots.install(model(2))
        slots.switch()
        slots.install(model(3))
        slots.switch()
        assert statuses(slots) == ("b", "bad", "trying")
        np.testing.assert_array_equal(slots.predict(X), X * 3)


# --- models that fail while they serve ----------------------------------------------------------------------------


def test_a_model_on_trial_that_fails_is_given_up_and_the_request_answered(running: Slots, model: MakeModel) -> None:
    running.install(model(3, graph=TWO_ROWS))
    running.switch()
    np.testing.assert_array_equal(running.predict(X), X * 3)
    np.testing.assert_array_equal(running.predict(X[:1]), X[:1] * 2)  # no error, the old model's answer
    assert statuses(running) == ("a", "good", "bad")
    assert "cannot be run" in running.state.b.reason


def test_numbers_that_are_not_finite_count_as_failure(running: Slots, model: MakeModel) -> None:
    running.install(model(3, graph=LOG, vectors=False))
    running.switch()
    np.testing.assert_allclose(running.predict(X), np.log(X + 3), rtol=1e-6)
    np.testing.assert_array_equal(running.predict(-8 * X), -16 * X)
    assert statuses(running) == ("a", "good", "bad")


def test_a_request_that_no_model_can_answer_blames_none(running: Slots, model: MakeModel) -> None:
    running.install(model(3))
    running.switch()
    assert np.isnan(running.predict(X * np.float32(np.nan))).all()
    with pytest.raises(RuntimeInputError):
        running.predict(X.astype(np.float64))
    assert statuses(running) == ("b", "good", "trying")


def test_a_good_model_keeps_its_place(running: Slots, model: MakeModel) -> None:
    running.install(model(3, graph=TWO_ROWS))
    running.switch()
    running.confirm()
    with pytest.raises(RuntimeProgramError):
        running.predict(X[:1])
    assert statuses(running) == ("b", "good", "good")


def test_without_a_last_good_model_the_error_reaches_the_caller(
    model: MakeModel, trusted: list[bytes], tmp_path: Path
) -> None:
    with Slots(tmp_path / "slots", trusted) as slots:
        slots.install(model(3, graph=TWO_ROWS))
        slots.switch()
        with pytest.raises(RuntimeProgramError):
            slots.predict(X[:1])
        np.testing.assert_array_equal(slots.predict(X), X * 3)


# --- starts -------------------------------------------------------------------------------------------------------


def crash(folder: Path, trusted: list[bytes], then: str = "") -> None:
    """A process that opens the slots and is gone without closing them."""
    code = (
        "import os, sys, numpy as np; from pathlib import Path; from archipel.lite_runtime.slots import Slots\n"
        f"slots = Slots(Path(sys.argv[1]), [bytes.fromhex(sys.argv[2])], confirm_after=None)\n{then}\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), trusted[0].hex()], check=True, timeout=60)


def test_a_trial_that_is_never_confirmed_ends_after_its_attempts(
    running: Slots, model: MakeModel, trusted: list[bytes], tmp_path: Path
) -> None:
    running.install(model(3))
    running.switch()
    running.close()
    crash(tmp_path / "slots", trusted)
    crash(tmp_path / "slots", trusted)
    with Slots(tmp_path / "slots", trusted, confirm_after=None) as slots:
        assert (statuses(slots), slots.state.b.attempts) == (("b", "good", "trying"), 0)
        np.testing.assert_array_equal(slots.predict(X), X * 3)
    crash(tmp_path / "slots", trusted)  # the close before gave its own attempt back
    with Slots(tmp_path / "slots", trusted) as slots:
        assert statuses(slots) == ("a", "good", "bad")
        assert "never confirmed" in slots.state.b.reason
        np.testing.assert_array_equal(slots.predict(X), X * 2)


def test_the_attempt_is_counted_before_the_model_is_touched(
    running: Slots, model: MakeModel, trusted: list[bytes], tmp_path: Path
) -> None:
    running.install(model(3))
    running.close()
    # A native crash in the middle of loading: the process is gone as soon as ONNX Runtime is asked for a session.
    dies = "import onnxruntime\nonnxruntime.InferenceSession = lambda *a, **k: os._exit(0)\nslots.switch()"
    for left in (2, 1, 0):
        crash(tmp_path / "slots", trusted, dies)
        with SlotFolder(tmp_path / "slots") as folder:
            assert (folder.state.b.status, folder.state.b.attempts) == ("staged", left)
    with Slots(tmp_path / "slots", trusted) as slots:
        with pytest.raises(SlotError, match="slot b is given up"):
            slots.switch()
        assert statuses(slots) == ("a", "good", "bad")
        np.testing.assert_array_equal(slots.predict(X), X * 2)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["weights", "manifest", "missing", "learned", "another"])
def test_a_damaged_slot_falls_back_to_the_other(
    running: Slots, model: MakeModel, trusted: list[bytes], tmp_path: Path, what: str
) -> None:
    running.install(model(3))
    running.switch()
    running.confirm()
    running.close()
    slot = tmp_path / "slots" / "b"
    if what == "weights":
        flip(slot / "bundle" / b.WEIGHTS_FILE)
    elif what == "manifest":
        flip(slot / "bundle" / "manifest.json")
    elif what == "missing":
        shutil.rmtree(slot)
    elif what == "learned":
        (slot / "learned.safetensors").write_bytes(b"\0" * 100)
    else:
        shutil.rmtree(slot / "bundle")
        shutil.copytree(model(5), slot / "bundle")  # signed, but not what was installed
    with Slots(tmp_path / "slots", trusted) as slots:
        assert statuses(slots) == ("a", "good", "bad")
        assert slots.state.b.reason
        np.testing.assert_array_equal(slots.predict(X), X * 2)


def test_two_damaged_slots_are_an_error_that_names_both(
    running: Slots, model: MakeModel, trusted: list[bytes], tmp_path: Path
) -> None:
    running.install(model(3))
    running.switch()
    running.confirm()
    running.close()
    for name in ("a", "b"):
        flip(tmp_path / "slots" / name / "bundle" / b.WEIGHTS_FILE)
    before = (tmp_path / "slots" / "state.json").read_bytes()
    for _ in range(2):
        with pytest.raises(SlotError, match=r"slot b: .*SHA-256.*; slot a: .*SHA-256") as caught:
            Slots(tmp_path / "slots", trusted)
        assert "Install a bundle" in str(caught.value)
    assert (tmp_path / "slots" / "state.json").read_bytes() == before
    with Slots(tmp_path / "slots", trusted, load=False) as slots:
        slots.install(model(5))
        slots.switch()
        np.testing.assert_array_equal(slots.predict(X), X * 5)


def test_the_wrong_keys_change_nothing(running: Slots, trusted: list[bytes], tmp_path: Path) -> None:
    running.close()
    with pytest.raises(SlotError, match="none of the 1 trusted keys signed"):
        Slots(tmp_path / "slots", [b.generate_key().public_key().public_bytes_raw()])
    with Slots(tmp_path / "slots", trusted) as slots:
        np.testing.assert_array_equal(slots.predict(X), X * 2)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b'{"format": 2}', "format 2"),
        (b'{"format": 1, "active": "c"}', "damaged"),
        (b'{"format": 1, "more": 1}', "damaged"),
        (b'{"format": 1, "active": "a"}', "slot a is active but 'empty'"),
        (b'{"format": 1, "a": {"status": "good"}}', "its digest is ''"),
        (b'{"format": 1, "a": {"status": "good", "digest": "x"}}', "damaged"),
        (b'{"format": 1, "a": {"status": "trying", "digest": "%s"}}' % (b"a" * 64), "not active"),
        (b'{"format": 1, "a": {"status": "staged", "digest": "%s", "attempts": -1}}' % (b"a" * 64), "damaged"),
        (b"[" * 60_000, "damaged"),
        (b" " * 70_000, "more than"),
        (b"\xff\xfe", "damaged"),
    ],
)
def test_a_damaged_state_file_is_an_error(trusted: list[bytes], tmp_path: Path, state: bytes, error: str) -> None:
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots" / "state.json").write_bytes(state)
    for _ in range(2):  # and the lock is free again
        with pytest.raises(SlotError, match=error):
            Slots(tmp_path / "slots", trusted)


def test_one_owner(running: Slots, trusted: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(SlotError, match="another process, or another Slots of this one, owns it"):
        Slots(tmp_path / "slots", trusted)
    code = "import sys; from archipel.lite_runtime.slots import Slots; Slots(sys.argv[1], [])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "slots")], capture_output=True, text=True, timeout=60, check=False
    )
    assert "owns it" in done.stderr
    running.close()
    Slots(tmp_path / "slots", trusted).close()


def test_closed_slots_do_nothing_more(running: Slots, model: MakeModel) -> None:
    running.close()
    running.close()
    calls: list[Callable[[], object]] = [
        lambda: running.predict(X), running.confirm, running.rollback, running.switch, running.save,
        lambda: running.install(model(3)), lambda: running.runtime,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SlotError):
            call()


def test_options_that_make_no_sense(trusted: list[bytes], tmp_path: Path) -> None:
    for options in ({"attempts": 0}, {"attempts": 10_000}, {"confirm_after": 0}):
        with pytest.raises(SlotError, match="attempts must be"):
            Slots(tmp_path / "slots", trusted, **options)  # type: ignore[arg-type]


def test_a_full_disk_leaves_the_running_model(
    running: Slots, model: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.fsync
    target = model(3)
    before = msgspec.json.encode(running.state)
    calls = 0
    while True:
        left = calls

        def failing(handle: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(28, "No space left on device")
            real(handle)

        monkeypatch.setattr(os, "fsync", failing)
        try:
            running.install(target)
            break
        except SlotError as error:
            assert "No space left" in str(error)  # noqa: PT017
        finally:
            monkeypatch.setattr(os, "fsync", real)
        np.testing.assert_array_equal(running.predict(X), X * 2)
        assert statuses(running)[:2] == ("a", "good")
        calls += 1
    assert calls > 5
    assert before != msgspec.json.encode(running.state)
    running.switch()
    np.testing.assert_array_equal(running.predict(X), X * 3)


def test_requests_are_answered_where_nothing_can_be_written(
    running: Slots, model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.install(model(3, graph=TWO_ROWS))
    running.switch()
    running._confirm_after = 1

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        np.testing.assert_array_equal(running.predict(X[:1]), X[:1] * 2)
        np.testing.assert_array_equal(running.predict(X), X * 3)
        with pytest.raises(SlotError, match="nothing changed"):
            running.confirm()
        assert statuses(running) == ("b", "good", "trying")
    np.testing.assert_array_equal(running.predict(X[:1]), X[:1] * 2)
    assert statuses(running) == ("a", "good", "bad")


# --- many threads -------------------------------------------------------------------------------------------------


def test_no_request_is_lost_or_mixed_during_switches(running: Slots, model: MakeModel) -> None:
    """Three threads ask without pause during 20 switches; each answer is one model's, as a whole."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((4, 3)).astype(np.float32) for _ in range(3)]
    stop = threading.Event()
    counts = [[0, 0] for _ in inputs]
    wrong: list[object] = []

    def ask(index: int) -> None:
        x = inputs[index]
        double, triple = x * np.float32(2), x * np.float32(3)
        while not stop.is_set():
            try:
                answer = running.predict(x)
            except BaseException as error:  # noqa: BLE001
                wrong.append(error)
                return
            if np.array_equal(answer, double):
                counts[index][0] += 1
            elif np.array_equal(answer, triple):
                counts[index][1] += 1
            else:
                wrong.append(answer)
                return

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)  # more interruptions, and in more places
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            factor = 3 - number % 2
            running.install(model(factor))
            running.switch()
            np.testing.assert_array_equal(running.predict(X), X * factor)
            running.confirm()
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join(30)
    assert wrong == []
    assert all(double and triple for double, triple in counts)


def test_many_requests_that_fail_at_once_return_once(running: Slots, model: MakeModel) -> None:
    running.install(model(3, graph=TWO_ROWS))
    running.switch()
    barrier = threading.Barrier(8)
    answers: list[np.ndarray] = []

    def ask() -> None:
        barrier.wait()
        answers.append(running.predict(X[:1]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 8
    for answer in answers:
        np.testing.assert_array_equal(answer, X[:1] * 2)
    assert statuses(running) == ("a", "good", "bad")
