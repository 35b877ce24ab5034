"""What a start finds: trials that ended, damaged slots, another owner, a full disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from archipel import bundle as b
from archipel.errors import (
    SlotError,
)
from archipel.lite_runtime.slots.folder import SlotFolder
from archipel.lite_runtime.slots.model_slots import Slots
from tests.support.scaling import TWO_ROWS, ScalingModels, X, statuses


def crash(folder: Path, trusted: list[bytes], then: str = "") -> None:
    """A process that opens the slots and is gone without closing them."""
    code = (
        "import os, sys, numpy as np; from pathlib import Path; from archipel.lite_runtime import Slots\n"
        f"slots = Slots(Path(sys.argv[1]), [bytes.fromhex(sys.argv[2])], confirm_after=None)\n{then}\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), trusted[0].hex()], check=True, timeout=60)


@pytest.mark.sampled(every=4)
def test_a_trial_that_is_never_confirmed_ends_after_its_attempts(
    running: Slots, model: ScalingModels, trusted: list[bytes], tmp_path: Path
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


@pytest.mark.sampled(every=4)
def test_the_attempt_is_counted_before_the_model_is_touched(
    running: Slots, model: ScalingModels, trusted: list[bytes], tmp_path: Path
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
@pytest.mark.sampled(every=6)
def test_a_damaged_slot_falls_back_to_the_other(
    running: Slots, model: ScalingModels, trusted: list[bytes], tmp_path: Path, what: str
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
    running: Slots, model: ScalingModels, trusted: list[bytes], tmp_path: Path
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


@pytest.mark.sampled(every=3)
def test_one_owner(running: Slots, trusted: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(SlotError, match="another process, or another Slots of this one, owns it"):
        Slots(tmp_path / "slots", trusted)
    code = "import sys; from archipel.lite_runtime.slots.model_slots import Slots; Slots(sys.argv[1], [])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "slots")], capture_output=True, text=True, timeout=60, check=False
    )
    assert "owns it" in done.stderr
    running.close()
    Slots(tmp_path / "slots", trusted).close()


def test_closed_slots_do_nothing_more(running: Slots, model: ScalingModels) -> None:
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


@pytest.mark.sampled(every=3)
def test_a_full_disk_leaves_the_running_model(
    running: Slots, model: ScalingModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    running: Slots, model: ScalingModels, monkeypatch: pytest.MonkeyPatch
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
