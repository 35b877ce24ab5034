"""The owner's view of a device: who it is, what it did and sent, and what privacy that cost.

All of it comes from the device's folder, without the folder's lock, so an agent may be running meanwhile.
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
from archipel.client.memory.stored import read_limited, read_stored
from archipel.errors import ClientError, MessageError
from archipel.lite_runtime.confinement import Holding, folder_modes, holdings
from archipel.lite_runtime.slots.folder import STATE_FILE, SlotState

_MAX_FILE_BYTES = 64 << 10


class ConditionNow(msgspec.Struct, frozen=True, kw_only=True):
    """A condition as it is now. `value` is None if it could not be measured; `why_not` is empty if it holds."""

    name: str
    value: str | float | bool | None
    holds: bool
    why_not: str


class ModelNow(msgspec.Struct, frozen=True, kw_only=True):
    """A model in one of the device's slots. `status` is as in `archipel slots show`, `digest` is the bundle's, and
    `version` is the number under which it was offered (0: it was installed without one)."""

    name: str
    version: int
    status: str
    digest: str


class TaskPrivacy(msgspec.Struct, frozen=True, kw_only=True):
    """What one task spent. Its `noised` rounds together are (`epsilon`, delta)-differentially private, or better, for
    each of the device's examples; None if there are none. What the server says of its own noise is in `spent.last`."""

    spent: Spent
    epsilon: float | None


class Privacy(msgspec.Struct, frozen=True, kw_only=True):
    """What all tasks spent. `epsilon` covers all `noised` rounds together; the other ones of `rounds` have none."""

    tasks: list[TaskPrivacy] = []
    rounds: int = 0
    noised: int = 0
    epsilon: float | None = None
    delta: float = DELTA


class OwnerView(msgspec.Struct, frozen=True, kw_only=True):
    """The view. Sizes are in bytes, times in Unix seconds.

    `device_id` is empty before enrolment; `running` is None if that cannot be known; `paused` is the reason, or empty;
    `conditions` is None if the caller gave none; the newest of `rounds` is the first.
    """

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
    """Read the view of the device in a folder.

    Arguments:
        folder: the device's folder.
        conditions: the owner's conditions, to be measured now.
        last: how many rounds to show, the newest first.
        delta: the delta of the epsilons.

    Raises:
        ClientError: there is no such folder, or a file in it is damaged.

    Example:
        view = look(Path("device"))
        print(view.totals.took_part, view.privacy.epsilon)
    """
    if not folder.is_dir():
        raise ClientError(f"{folder}: no such folder; `archipel device enroll` makes a device's")
    record = read_record(folder)
    entries, sums = read_rounds(folder)
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
        running=is_running(folder),
        paused=paused(folder),
        conditions=None if conditions is None else present_conditions(conditions),
        models=_models(folder / "models"),
        cache_bytes=folder_bytes(folder / "cache"),
        example_bytes=folder_bytes(folder / "examples"),
        rounds=entries[::-1][:last],
        totals=sums.totals,
        privacy=sum_privacy(sums.spent, delta),
        protections=[*holdings(), *folder_modes(folder, SECRETS)],
    )


def read_rounds(folder: Path) -> tuple[list[Entry], Sums]:
    """The rounds in the journal, the oldest first, and the sums over these and all earlier ones."""
    folder = folder / "rounds"
    before, entries, forgotten = None, [], read_forgotten(folder)
    # A running agent may move entries into the sums meanwhile. They are counted once if the sums are the same before
    # and after the entries were read.
    while before != forgotten:
        before, entries, forgotten = forgotten, read_entries(folder), read_forgotten(folder)
    # The agent writes the sums before it removes the entries, so some may be in both.
    entries = [entry for entry in entries if entry.round_id not in forgotten.rounds]
    return entries, forgotten.sums.plus(entries)


def sum_privacy(spent: Sequence[Spent], delta: float = DELTA) -> Privacy:
    """Add up what tasks spent, with the epsilons at `delta`."""
    # rho adds up over rounds and epsilon does not, so the epsilon of all tasks comes from the sum of their rhos.
    noised = sum(each.noised for each in spent)
    return Privacy(
        tasks=[TaskPrivacy(spent=each, epsilon=epsilon(each.rho, delta) if each.noised else None) for each in spent],
        rounds=sum(each.rounds for each in spent),
        noised=noised,
        epsilon=epsilon(sum(each.rho for each in spent), delta) if noised else None,
        delta=delta,
    )


def present_conditions(conditions: Conditions) -> list[ConditionNow]:
    """Each condition's value and whether it holds."""
    values, reasons = conditions.values(), conditions.reasons()
    return [
        ConditionNow(name=name, value=values.get(name), holds=not reason, why_not=reason)
        for name, reason in reasons.items()
    ]


def read_record(folder: Path) -> DeviceRecord | None:
    """The device's record, None before enrolment. It repairs nothing. Raises ClientError if the file is damaged."""
    remedy = "enrol again with a new token"
    return read_stored(folder / RECORD_FILE, _MAX_FILE_BYTES, "device record", DeviceRecord, remedy)


def is_running(folder: Path) -> bool | None:
    """Whether an agent holds the folder's lock; None if that cannot be known.

    The kernel's list of locks answers it: an attempt to take the lock could make an agent fail that starts meanwhile.
    """
    try:
        status = (folder / "lock").stat()
        locks = Path("/proc/locks").read_text()
    except FileNotFoundError:
        return None if (folder / "lock").exists() else False
    except OSError:
        return None
    # A line of /proc/locks: "1: FLOCK ADVISORY WRITE pid major:minor:inode 0 EOF"; "->" marks one that waits.
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    held = [line.split()[5] for line in locks.splitlines() if " FLOCK " in line and "->" not in line]
    if f"{device}:{status.st_ino}" in held:
        return True
    # On some file systems the list has another device number than `stat`: an equal inode number proves nothing then.
    return None if any(each.endswith(f":{status.st_ino}") for each in held) else False


def folder_bytes(path: Path) -> int:
    """The bytes of all files in the folder `path`, 0 if there is no such folder. Files may vanish meanwhile."""
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
            state = msgspec.json.decode(read_limited(path, _MAX_FILE_BYTES) or b"", type=SlotState)
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
