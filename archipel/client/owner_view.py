"""What a device's owner may know about it: who it is, what it did and sent, and what privacy that cost.

Everything is read from the device's folder, without its lock, so an agent may be at work meanwhile.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from archipel.bundle import open_bundle
from archipel.bundle.roles import Noise
from archipel.client.conditions import Conditions
from archipel.client.identity import RECORD_FILE, DeviceRecord
from archipel.client.journal import KEPT_ROUNDS, Entry
from archipel.client.pause import paused
from archipel.errors import ArchipelError, ClientError, MessageError
from archipel.lite_runtime.slot_folder import STATE_FILE, SlotState
from archipel.protocol.sealed import decode

Added = Literal["added", "none", "partly", "unknown"]
_MAX_FILE_BYTES = 64 << 10
_DRAWING = {"training": ("train", "finish"), "analytics": ("analyze",), "evaluation": ("evaluate",)}


class ConditionNow(msgspec.Struct, frozen=True, kw_only=True):
    """`value` is None where it could not be measured; `why_not` is empty while the condition holds."""

    name: str
    value: str | float | bool | None
    holds: bool
    why_not: str


class ModelNow(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the device's slots; `status` as in `archipel slots show`, `digest` its bundle's."""

    name: str
    status: str
    digest: str


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Of the rounds in the journal, which forgets all but the last KEPT_ROUNDS. `since` is when the first began."""

    rounds: int = 0
    took_part: int = 0
    dropped: int = 0
    refused: int = 0
    open: int = 0
    sent: int = 0
    received: int = 0
    since: float | None = None
    complete: bool = True


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What the rounds of one task and model told others about this device's examples.

    `secure`: rounds whose sum has this device's update in it, which the server could not see by itself; `smallest` and
    `median` are the numbers of devices in those sums, this one among them, where they were told (`untold`: not).
    `plain`: rounds in which the update went to the server as it is. `unsure`: secure rounds that this device left after
    it sent its masked update, which may be in a sum or not. `noise`: whether this device adds noise for differential
    privacy. How much that protects (an epsilon) is not accounted: the noise's scale is a constant of the bundle's
    signed graph and not of its manifest.
    """

    task_id: str
    model: str
    kind: str
    secure: int
    smallest: int | None
    median: int | None
    untold: int
    plain: int
    unsure: int
    sent: int
    received: int
    noise: Added


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
    privacy: list[Spent] = []


def look(folder: Path, conditions: Conditions | None = None, *, last: int = 10) -> OwnerView:
    """The view of the device in `folder`, with the `last` rounds. Raises ClientError for a damaged file in it."""
    if not folder.is_dir():
        raise ClientError(f"{folder}: no such folder; `archipel device enroll` makes a device's")
    record = read_record(folder)
    entries = read_entries(folder)
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
        totals=totals(entries),
        privacy=spent(entries, folder / "cache" / "bundles", [] if record is None else record.publisher_keys),
    )


def totals(entries: Sequence[Entry]) -> Totals:
    """The sums over `entries`, the oldest first."""
    results = [entry.result if entry.step == "closed" else "open" for entry in entries]
    return Totals(
        rounds=len(entries),
        **{name: results.count(name) for name in ("took_part", "dropped", "refused", "open")},
        sent=sum(entry.sent for entry in entries),
        received=sum(entry.received for entry in entries),
        since=entries[0].started if entries else None,
        complete=len(entries) < KEPT_ROUNDS,
    )


def spent(entries: Iterable[Entry], bundles: Path, publisher_keys: Sequence[bytes]) -> list[Spent]:
    """What was spent, by task, model and kind, in the order of their first rounds. Refused rounds sent nothing."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        if entry.result == "took_part" or entry.masked is not None:
            groups.setdefault((entry.task_id, entry.model, entry.kind), []).append(entry)
    found = []
    for (task_id, model, kind), group in groups.items():
        counted = [entry for entry in group if entry.privacy == "secure" and entry.result == "took_part"]
        cohorts = [entry.cohort for entry in counted if entry.cohort]
        plain = sum(entry.privacy == "plain" for entry in group)
        noises = {_noise(bundles / digest, kind, publisher_keys) for digest in {entry.bundle for entry in group}}
        found.append(
            Spent(
                task_id=task_id,
                model=model,
                kind=kind,
                secure=len(counted),
                smallest=min(cohorts, default=None),
                median=statistics.median_low(cohorts) if cohorts else None,
                untold=len(counted) - len(cohorts),
                plain=plain,
                unsure=len(group) - len(counted) - plain,
                sent=sum(entry.sent for entry in group),
                received=sum(entry.received for entry in group),
                noise=_together(noises),
            )
        )
    return found


def now(conditions: Conditions) -> list[ConditionNow]:
    """Each condition's value and whether it holds."""
    values, reasons = conditions.values(), conditions.reasons()
    return [
        ConditionNow(name=name, value=values.get(name), holds=not reason, why_not=reason)
        for name, reason in reasons.items()
    ]


def read_record(folder: Path) -> DeviceRecord | None:
    """Who the device is, None before enrolment. Nothing is repaired. Raises ClientError where the file is damaged."""
    data = _contents(folder / RECORD_FILE)
    try:
        return None if data is None else decode("device record", data, DeviceRecord)
    except MessageError as error:
        raise ClientError(f"{folder / RECORD_FILE}: damaged ({error}); enrol again with a new token") from None


def read_entries(folder: Path) -> list[Entry]:
    """The journal, the oldest round first. Raises ClientError where an entry is damaged."""
    found = []
    for path in (folder / "rounds").glob("*.json"):
        data = _contents(path)
        try:
            if data is not None:
                found.append(decode("journal entry", data, Entry))
        except MessageError as error:
            raise ClientError(f"{path}: damaged ({error}); remove it, and its round is forgotten") from None
    return sorted(found, key=lambda entry: entry.started)


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
    found = []
    for path in sorted(folder.glob(f"*/{STATE_FILE}")):
        try:
            state = msgspec.json.decode(_contents(path) or b"", type=SlotState)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ClientError(
                f"{path}: damaged ({error}); remove {path.parent}, and the model is fetched anew"
            ) from None
        for name in ("a", "b"):
            slot = state.slot(name)
            if slot.status != "empty":
                status = f"{slot.status}, active" if state.active == name else slot.status
                found.append(ModelNow(name=path.parent.name, status=status, digest=slot.digest))
    return found


def _noise(bundle: Path, kind: str, publisher_keys: Sequence[bytes]) -> Added:
    if not bundle.is_dir():
        return "unknown"
    try:
        programs = open_bundle(bundle, publisher_keys).manifest.programs.values()
    except (ArchipelError, OSError):
        # Its agent may be removing it just now.
        return "unknown"
    drawing = [program for program in programs if program.kind in _DRAWING[kind]]
    return "added" if any(isinstance(port, Noise) for each in drawing for port in each.inputs) else "none"


def _together(found: set[Added]) -> Added:
    if "unknown" in found:
        return "unknown"
    return found.pop() if len(found) == 1 else "partly"


def _contents(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ClientError(f"{path}: more than {_MAX_FILE_BYTES} bytes, so not one of the agent's")
    return data
