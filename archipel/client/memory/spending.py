"""What rounds told others about this device's examples, in sums that outlast their journal entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from archipel.client.memory.entry import Entry

MAX_ROWS = 256
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
_Sum = Annotated[float, msgspec.Meta(ge=0)]


class Totals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of all rounds. `since` is when the first began."""

    rounds: _Count = 0
    took_part: _Count = 0
    dropped: _Count = 0
    refused: _Count = 0
    open: _Count = 0
    sent: _Count = 0
    received: _Count = 0
    since: float | None = None

    def plus(self, entry: Entry) -> Totals:
        result = entry.result if entry.step == "closed" else "open"
        return msgspec.structs.replace(
            self,
            **{name: getattr(self, name) + 1 for name in ("rounds", result)},
            sent=self.sent + entry.sent,
            received=self.received + entry.received,
            since=entry.started if self.since is None else self.since,
        )


class Spent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the rounds of one task, model and kind in which an update was sent; without task and model, of many.

    `secure`: rounds whose sum has this device's update in it, which the server could not see by itself; in the `told`
    ones of them it is known of how many devices: `smallest`, and `devices` in all, this one each time among them.
    `plain`: rounds in which the update went to the server as it is. `unsure`: secure rounds that this device left after
    it sent its masked update, which may be in a sum or not.

    Of all these rounds `noised` added noise for differential privacy whose strength the bundle states, `rho` together
    (client.privacy); the others none, or none that can be accounted.
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

    @property
    def rounds(self) -> int:
        return self.secure + self.plain + self.unsure

    def plus(self, other: Spent) -> Spent:
        """Both together, under the names of this one."""
        names = ("secure", "told", "devices", "plain", "unsure", "sent", "received", "noised", "rho")
        known = [each.smallest for each in (self, other) if each.told]
        return msgspec.structs.replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            smallest=min(known, default=0),
        )


class Sums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`spent` in the order of their first rounds. Beyond MAX_ROWS tasks the oldest become one for each kind."""

    totals: Totals = Totals()
    spent: list[Spent] = []

    def plus(self, entries: Iterable[Entry]) -> Sums:
        """With these rounds, the oldest first. Refused ones sent nothing."""
        totals, rows = self.totals, {(row.task_id, row.model, row.kind): row for row in self.spent}
        for entry in entries:
            totals = totals.plus(entry)
            if entry.result == "took_part" or entry.masked is not None:
                spent = _spent(entry)
                key = spent.task_id, spent.model, spent.kind
                rows[key] = rows[key].plus(spent) if key in rows else spent
        # A server that makes a task for each round must not make the file grow: the oldest become one row for a kind.
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
    )
