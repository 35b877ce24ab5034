"""What a device's owner may know about it: who it is, what it did and sent, and what privacy that cost.

Everything is read from the device's folder, without its lock, so an agent may be at work meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from archipel.client.conditions.conditions import Conditions
from archipel.client.conditions.pause import paused
from archipel.client.connection.identity import RECORD_FILE, DeviceRecord
from archipel.client.memory.entry import Entry
from archipel.client.memory.journal import read_entries, read_forgotten
from archipel.client.memory.keystore import SECRETS
from archipel.client.memory.privacy import DELTA, epsilon
from archipel.client.memory.spending import Spent, Sums, Totals
from archipel.client.memory.stored import contents, read_stored
from archipel.errors import ClientError, MessageError
from archipel.lite_runtime.confinement import Holding, folder_modes, holdings
from archipel.lite_runtime.slots.folder import STATE_FILE, SlotState

_MAX_FILE_BYTES = 64 << 10


class ConditionNow(msgspec.Struct, frozen=True, kw_only=True):
    """`value` is None where it could not be measured; `why_not` is empty while the condition holds."""

    name: str
    value: str | float | bool | None
    holds: bool
    why_not: str


class ModelNow(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the device's slots; `status` as in `archipel slots show`, `digest` its bundle's, `version` what it was
    offered as (0: installed without one)."""

    name: str
    version: int
    status: str
    digest: str


class TaskPrivacy(msgspec.Struct, frozen=True, kw_only=True):
    """What one task spent. Its `noised` rounds together are (`epsilon`, `delta`)-differentially private for each of the
    device's examples, at least: None where there are none."""

    spent: Spent
    epsilon: float | None


class Privacy(msgspec.Struct, frozen=True, kw_only=True):
    """What all tasks spent. `epsilon` is that of all `noised` rounds together; the other `rounds` have none."""

    tasks: list[TaskPrivacy] = []
    rounds: int = 0
    noised: int = 0
    epsilon: float | None = None
    delta: float = DELTA


class OwnerView(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are bytes, times Unix seconds. `device_id` is empty before enrolment, `running` None where that cannot be
    known, `paused` empty or why, `conditions` None where they are not known; the newest of `rounds` is the first."""

    folder: str
    device_id: str = ""
    server: str = ""
    population: str = ""
    rotations: int = 0
    running: bool | None = None
    paused: str = ""
    conditions: list[ConditionNow] | None = None
    models: list[ModelNow] = []
    cache_bytes: int = 0
    example_bytes: int = 0
    rounds: list[Entry] = []
    totals: Totals = Totals()
    privacy: Privacy = Privacy()
    protections: list[Holding] = []


def look(folder: Path, conditions: Conditions | None = None, *, last: int = 10, delta: float = DELTA) -> OwnerView:
    """The view of the device in `folder`, with the `last` rounds, and its epsilons at `delta`.

    Raises ClientError for a damaged file in the folder.
    """
    if not folder.is_dir():
        raise ClientError(f"{folder}: no such folder; `archipel device enroll` makes a device's")
    record = read_record(folder)
    entries, sums = rounds(folder)
    known = {}
    if record is not None:
        known = {
            "device_id": record.device_id,
            "server": record.server,
            "population": record.population,
            "rotations": len(record.chain.rotations),
        }
    return OwnerView(
        folder=str(folder),
        **known,  # type: ignore[arg-type]
        running=running(folder),
        paused=paused(folder),
        conditions=None if conditions is None else now(conditions),
        models=_models(folder / "models"),
        cache_bytes=size(folder / "cache"),
        example_bytes=size(folder / "examples"),
        rounds=entries[::-1][:last],
        totals=sums.totals,
        privacy=privacy(sums.spent, delta),
        protections=[*holdings(), *folder_modes(folder, SECRETS)],
    )


def rounds(folder: Path) -> tuple[list[Entry], Sums]:
    """The rounds in the journal, the oldest first, and the sums over these and all before them."""
    folder = folder / "rounds"
    before, kept, gone = None, [], read_forgotten(folder)
    while before != gone:  # An agent may be at work: what it forgets meanwhile must not be counted twice.
        before, kept, gone = gone, read_entries(folder), read_forgotten(folder)
    entries = [entry for entry in kept if entry.round_id not in gone.rounds]
    return entries, gone.sums.plus(entries)


def privacy(spent: Sequence[Spent], delta: float = DELTA) -> Privacy:
    """With the epsilons at `delta`."""
    noised = sum(each.noised for each in spent)
    return Privacy(
        tasks=[TaskPrivacy(spent=each, epsilon=epsilon(each.rho, delta) if each.noised else None) for each in spent],
        rounds=sum(each.rounds for each in spent),
        noised=noised,
        epsilon=epsilon(sum(each.rho for each in spent), delta) if noised else None,
        delta=delta,
    )


def now(conditions: Conditions) -> list[ConditionNow]:
    """Each condition's value and whether it holds."""
    values, reasons = conditions.values(), conditions.reasons()
    return [
        ConditionNow(name=name, value=values.get(name), holds=not reason, why_not=reason)
        for name, reason in reasons.items()
    ]


def read_record(folder: Path) -> DeviceRecord | None:
    """Who the device is, None before enrolment. Nothing is repaired. Raises ClientError where the file is damaged."""
    remedy = "enrol again with a new token"
    return read_stored(folder / RECORD_FILE, _MAX_FILE_BYTES, "device record", DeviceRecord, remedy)


def running(folder: Path) -> bool | None:
    """Whether an agent holds the folder's lock. Asked of the kernel: taking the lock to see could stop one's start."""
    try:
        status = (folder / "lock").stat()
        locks = Path("/proc/locks").read_text()
    except FileNotFoundError:
        return None if (folder / "lock").exists() else False
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    held = [line.split()[5] for line in locks.splitlines() if " FLOCK " in line and "->" not in line]
    if f"{device}:{status.st_ino}" in held:
        return True
    # Some file systems have other numbers there than `stat` gives.
    return None if any(each.endswith(f":{status.st_ino}") for each in held) else False


def size(path: Path) -> int:
    """Bytes of all files in the folder `path`, 0 where there is none. Others may be removing some."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _models(folder: Path) -> list[ModelNow]:
    models = []
    for path in sorted(folder.glob(f"*/{STATE_FILE}")):
        try:
            state = msgspec.json.decode(contents(path, _MAX_FILE_BYTES) or b"", type=SlotState)
        except (MessageError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ClientError(
                f"{path}: damaged ({error}); remove {path.parent}, and the model is fetched anew"
            ) from None
        for name in ("a", "b"):
            slot = state.slot(name)
            if slot.status != "empty":
                status = f"{slot.status}, active" if state.active == name else slot.status
                models.append(ModelNow(name=path.parent.name, version=slot.version, status=status, digest=slot.digest))
    return models
