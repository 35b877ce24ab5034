from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel.client.memory import journal as j
from archipel.client.memory.journal import Journal, OpenRound
from archipel.client.memory.vault import Vault
from archipel.errors import ClientError
from archipel.protocol.messages import RoundPlan

MASKED = b"masked bytes"
DIGEST = hashlib.sha256(MASKED).hexdigest()


def begin(journal: Journal, number: int = 0, task: int | None = None) -> OpenRound:
    """Round `number`, of a task of its own where none is given."""
    plan = RoundPlan(
        round_id=f"{number:032x}", task_id=f"{number if task is None else task:032x}", number=number + 1,
        bundle="d" * 64, weights="e" * 64,
        privacy="secure", min_cohort=3, max_cohort=3, threshold=3, modulus_bits=24, serial=number + 1, not_after=2**40,
    )  # fmt: skip
    return journal.begin(plan, "c" * 64)


def journal_in(folder: Path, clock: Callable[[], float] = time.time) -> Journal:
    return Journal(folder, Vault(b"k" * 32), clock)


def test_every_step_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    opened = begin(journal_in(tmp_path))
    assert not opened.keys_sent
    for step in ("advertising", "sharing", "complaining", "masked", "confirming", "unmasking"):
        if step == "masked":
            opened.store_masked(MASKED, DIGEST)
        elif step == "confirming":
            opened.store_state(b"state", "model.sealed", 3)
        else:
            opened.advance(step)
        [again] = journal_in(tmp_path).unfinished()
        assert again.entry == opened.entry
        assert again.entry.step == step
        assert again.keys_sent
        assert again.counted == (step in ("confirming", "unmasking"))
        # Masked bytes may be sent again only while they are the last step.
        assert again.masked() == ((MASKED, DIGEST) if step == "masked" else None)
        assert again.state() == (b"state" if again.counted else None)
    opened.close("took_part", sent=5)
    assert journal_in(tmp_path).unfinished() == []
    [entry] = journal_in(tmp_path).entries()
    assert (entry.result, entry.sent, entry.masked) == ("took_part", 5, DIGEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{0:032x}.json", "plans"]


def test_a_round_may_begin_again_only_before_keys_are_sent(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    begin(journal)
    opened = begin(journal)
    opened.advance("advertising")
    with pytest.raises(ClientError, match="has been in it already"):
        begin(journal)
    opened.close("dropped")
    with pytest.raises(ClientError, match="has been in it already"):
        begin(journal_in(tmp_path))


def test_masked_bytes_are_never_replaced(tmp_path: Path) -> None:
    opened = begin(journal_in(tmp_path))
    opened.store_masked(MASKED, DIGEST)
    with pytest.raises(ClientError, match="never replaced"):
        opened.store_masked(b"other", hashlib.sha256(b"other").hexdigest())
    [again] = journal_in(tmp_path).unfinished()
    with pytest.raises(ClientError, match="never replaced"):
        again.store_masked(b"other", hashlib.sha256(b"other").hexdigest())


def test_masked_bytes_that_do_not_match_their_digest_are_not_sent(tmp_path: Path) -> None:
    opened = begin(journal_in(tmp_path))
    opened.store_masked(MASKED, DIGEST)
    (tmp_path / f"{0:032x}.masked").write_bytes(b"damaged")
    assert opened.masked() is None


def test_sealed_bytes_that_are_not_those_that_were_recorded_are_not_sent(tmp_path: Path) -> None:
    """Sealed with the right key for the right place, as by a process that went on with an older journal."""
    opened = begin(journal_in(tmp_path))
    opened.store_masked(MASKED, DIGEST)
    Vault(b"k" * 32).write(tmp_path / f"{0:032x}.masked", b"other bytes!")
    assert opened.masked() is None


def test_no_step_is_recorded_whose_bytes_could_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = begin(journal_in(tmp_path))
    opened.advance("sharing")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(opened._journal._vault, "write", full)
        with pytest.raises(OSError, match="No space"):
            opened.store_masked(MASKED, DIGEST)
    [again] = journal_in(tmp_path).unfinished()
    assert (again.entry.step, again.entry.masked) == ("sharing", None)
    again.store_masked(MASKED, DIGEST)


def test_masked_bytes_whose_step_was_not_recorded_are_not_sent(tmp_path: Path) -> None:
    # Killed between the two writes of store_masked: nothing was sent, and nothing will be.
    opened = begin(journal_in(tmp_path))
    opened.advance("sharing")
    (tmp_path / f"{0:032x}.masked").write_bytes(MASKED)
    [again] = journal_in(tmp_path).unfinished()
    assert again.masked() is None
    again.close("dropped")
    assert not (tmp_path / f"{0:032x}.masked").exists()


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    opened = begin(journal_in(tmp_path))
    opened.close("dropped")
    for name in (f"{0:032x}.masked", f"{0:032x}.state", f"{7:032x}.masked", ".x.json.abc.tmp"):
        (tmp_path / name).write_bytes(b"left")
    journal_in(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{0:032x}.json", "plans"]


def test_a_write_that_fails_half_way_is_seen_as_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_in(tmp_path)
    opened = [begin(journal, number) for number in range(2)]
    assert [each.entry for each in journal.unfinished()] == [each.entry for each in opened]
    real = j.write_durably

    def fails(path: Path, data: bytes) -> None:
        real(path, data)
        raise OSError("no space left for the folder")

    with monkeypatch.context() as patch:
        patch.setattr(j, "write_durably", fails)
        for change in (lambda: opened[0].close("dropped"), lambda: opened[1].advance("advertising")):
            with pytest.raises(OSError, match="no space"):
                change()
    [left] = journal.unfinished()
    assert [left.entry] == [each.entry for each in journal_in(tmp_path).unfinished()]
    assert left.entry.step == "advertising"
    left.close("dropped")
    assert journal.unfinished() == []


def test_old_rounds_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(j, "KEPT_ROUNDS", 3)
    times = iter(range(1000))
    journal = journal_in(tmp_path, clock=lambda: float(next(times)))
    still_open = begin(journal, 99)
    for number in range(5):
        begin(journal, number).close("took_part")
    assert [entry.number for entry in journal.entries()] == [100, 3, 4, 5]
    assert [opened.entry for opened in journal.unfinished()] == [still_open.entry]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1000), value=st.integers(0, 255), cut=st.integers(0, 1000))
@pytest.mark.sampled(every=4)
def test_a_damaged_entry_is_an_entry_or_the_documented_error(tmp_path: Path, at: int, value: int, cut: int) -> None:
    path = tmp_path / f"{0:032x}.json"
    path.unlink(missing_ok=True)
    (tmp_path / "plans").unlink(missing_ok=True)
    begin(journal_in(tmp_path))
    data = path.read_bytes()
    changed = bytearray(data)
    changed[at % len(changed)] = value
    for damaged in (bytes(changed), data[: cut % len(data)]):
        path.write_bytes(damaged)
        with contextlib.suppress(ClientError):
            journal_in(tmp_path).entries()
    path.write_bytes(data[:-1])
    with pytest.raises(ClientError, match=r"damaged .*remove it"):
        journal_in(tmp_path).entries()


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "corpus").glob("entry-*.json")), ids=lambda p: p.stem)
def test_kept_damaged_entries(path: Path, tmp_path: Path) -> None:
    (tmp_path / f"{0:032x}.json").write_bytes(path.read_bytes())
    with pytest.raises(ClientError, match="damaged"):
        journal_in(tmp_path).entries()
