"""What rounds told others about this device's examples, in sums that outlast the rounds' journal entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from archipel.client.memory.entry import Entry
from archipel.protocol.messages import ServerNoise

MAX_ROWS = 256
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
_Sum = Annotated[float, msgspec.Meta(ge=0)]


class Totals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers over all rounds, and bytes sent and received. `since` is when the first round began (Unix seconds)."""

    rounds: _Count = 0
    took_part: _Count = 0
    dropped: _Count = 0
    refused: _Count = 0
    open: _Count = 0
    sent: _Count = 0
    received: _Count = 0
    since: float | None = None

    def plus(self, entry: Entry) -> Totals:
        """The totals with one more round."""
        result = entry.result if entry.step == "closed" else "open"
        return msgspec.structs.replace(
            self,
            **{name: getattr(self, name) + 1 for name in ("rounds", result)},
            sent=self.sent + entry.sent,
            received=self.received + entry.received,
            since=entry.started if self.since is None else self.since,
        )


class Spent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers over the rounds of one task, model and kind in which the device sent an update.

    secure     rounds whose sum has this device's update in it; the server saw the sum alone
    told       those of the secure rounds whose number of devices is known
    smallest   the fewest devices in one of the told rounds
    devices    the devices of all told rounds together; this device is in each
    plain      rounds in which the server got the update itself
    unsure     secure rounds that the device left after it sent its masked update, which is in a sum or lost
    noised     those of all these rounds with noise whose strength the bundle states
    rho        the sum of the rhos of the noised rounds (privacy.py)
    stated     those of the rounds to whose sum the server says that it adds noise
    last       what it said of that in the newest of them

    An empty task and model stand for many of the same kind.
    """

    task_id: str
    model: str
    kind: str
    secure: _Count = 0
    told: _Count = 0
    smallest: _Count = 0
    devices: _Count = 0
    plain: _Count = 0
    unsure: _Count = 0
    sent: _Count = 0
    received: _Count = 0
    noised: _Count = 0
    rho: _Sum = 0.0
    stated: _Count = 0
    last: ServerNoise | None = None

    @property
    def rounds(self) -> int:
        return self.secure + self.plain + self.unsure

    def plus(self, other: Spent) -> Spent:
        """The sum of both, with the task, model and kind of this one."""
        names = ("secure", "told", "devices", "plain", "unsure", "sent", "received", "noised", "rho", "stated")
        # Without a told round `smallest` is 0, which is no number of devices.
        known = [each.smallest for each in (self, other) if each.told]
        return msgspec.structs.replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            smallest=min(known, default=0),
            last=other.last or self.last,
        )


class Sums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All sums; `spent` is in the order of the first rounds, with one row for each kind beyond MAX_ROWS tasks."""

    totals: Totals = Totals()
    spent: list[Spent] = []

    def plus(self, entries: Iterable[Entry]) -> Sums:
        """The sums with these rounds, which come with the oldest first."""
        totals, rows = self.totals, {(row.task_id, row.model, row.kind): row for row in self.spent}
        for entry in entries:
            totals = totals.plus(entry)
            # Rounds in which nothing was sent cost nothing; a stored update may have been sent, whatever the result.
            if entry.result == "took_part" or entry.masked is not None:
                spent = _spent(entry)
                key = spent.task_id, spent.model, spent.kind
                rows[key] = rows[key].plus(spent) if key in rows else spent
        # A server that makes a task for each round must not make the file grow without limit.
        for key in [key for key in rows if key[0]][:-MAX_ROWS]:
            rest = ("", "", key[2])
            rows[rest] = rows.get(rest, Spent(task_id="", model="", kind=key[2])).plus(rows.pop(key))
        return Sums(totals=totals, spent=sorted(rows.values(), key=lambda row: bool(row.task_id)))


def _spent(entry: Entry) -> Spent:
    counted = entry.privacy == "secure" and entry.result == "took_part"
    stated = entry.noise == "added" and entry.rho > 0
    return Spent(
        task_id=entry.task_id,
        model=entry.model,
        kind=entry.kind,
        secure=int(counted),
        told=int(counted and entry.cohort > 0),
        smallest=entry.cohort if counted else 0,
        devices=entry.cohort if counted else 0,
        plain=int(entry.privacy == "plain"),
        unsure=int(entry.privacy == "secure" and not counted),
        sent=entry.sent,
        received=entry.received,
        noised=int(stated),
        rho=entry.rho if stated else 0.0,
        stated=int(entry.stated is not None),
        last=entry.stated,
    )
