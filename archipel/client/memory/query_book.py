"""The evaluations and analyses that this device was in: their devices, so that none is singled out by a difference.

Two sums over sets that differ by one device give what that device sent; over sets that differ by few, what a few did.
So a device keeps the devices of every query that it confirmed, and confirms another one only if its devices are the
same or at least `min_contributors` others: counted are those that are in one of the two sets only, for what the two
sums differ by is made of these, and of these alone. (That only one device is missing does no harm where enough others
came: the difference is its part less the sum of theirs.)

It counts queries, too: the publisher's policy says how many there may be in how many days. Both are written before the
confirmation is sent, and a round counts whatever becomes of it: the device does not know who confirmed besides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from archipel.bundle import PrivacyPolicy
from archipel.bundle.validation import MAX_QUERIES
from archipel.client.memory.stored import read_stored
from archipel.durable import write_durably
from archipel.errors import ClientError, PolicyError
from archipel.protocol.messages import MAX_COHORT, RoundId, RoundPlan
from archipel.protocol.sealed import encode

FILE = "queries"
_ID_BYTES = 16
_MAX_FILE_BYTES = MAX_QUERIES * (2 * MAX_COHORT * _ID_BYTES + 1024)
_DAY = 86400.0
# No query is answered until somebody has looked: what was there is what protects this device.
_REMEDY = "remove it, and what earlier queries were about is forgotten"


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round. `devices` is the place of the devices in its sum among the book's sets; None: of a plain round, whose
    updates the server saw. It is kept from `at` to `until` (Unix seconds); `minimum` was its plan's."""

    round_id: RoundId
    at: float
    until: float
    minimum: Annotated[int, msgspec.Meta(ge=0)]
    devices: Annotated[int, msgspec.Meta(ge=0)] | None


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sets`: ids of devices, sorted, 16 bytes each; every set once, for most queries repeat one."""

    queries: Annotated[list[Query], msgspec.Meta(max_length=MAX_QUERIES)] = []
    sets: Annotated[list[bytes], msgspec.Meta(max_length=MAX_QUERIES)] = []


class QueryBook:
    """What one device keeps of its queries, in the file `queries` of `folder`.

    A device is in one population, and the book is for all its bundles: the same question can be put by several.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / FILE
        self._clock = clock

    def check_budget(self, plan: RoundPlan, policy: PrivacyPolicy) -> None:
        """Raises PolicyError where the policy allows no further query now, ClientError where the book is damaged."""
        now = self._clock()
        since = now - policy.query_days * _DAY
        # One from the future counts: the clock was set back, and how far nobody knows.
        kept = [each for each in self._read().queries if each.round_id != plan.round_id]
        spent = sum(each.at > since for each in kept)
        full = sum(each.until > now for each in kept) >= MAX_QUERIES
        if spent >= policy.queries or full:
            raise PolicyError(
                f"plan {plan.round_id}: this device was in {spent} evaluations and analyses in the last "
                f"{policy.query_days} days, the publisher allows {policy.queries}"
            )

    def add(self, plan: RoundPlan, policy: PrivacyPolicy, devices: Sequence[str]) -> None:
        """Keep the round's devices (none: of a plain round); durable when it returns.

        They must be those of each earlier query, or differ by at least `min_contributors` devices: the plan's, or that
        query's own if it was larger. Raises PolicyError where they differ by less, or nothing is left of the budget.
        """
        self.check_budget(plan, policy)
        now, kept = self._clock(), self._read()
        queries = [each for each in kept.queries if each.until > now and each.round_id != plan.round_id]
        sets = {each.devices: _ids(kept.sets[each.devices]) for each in queries if each.devices is not None}
        # The symmetric difference is what two sums tell of: see the file's description.
        new = frozenset(bytes.fromhex(device) for device in devices)
        if new:
            for each in queries:
                if each.devices is not None:
                    different = len(new ^ sets[each.devices])
                    _check_difference(plan, max(plan.min_contributors, each.minimum), different, each)
        # Sets that no query refers to any more are left out, so the places move.
        places: dict[frozenset[bytes], int] = {}
        for members in (*sets.values(), *([new] if new else [])):
            places.setdefault(members, len(places))
        made = Query(
            round_id=plan.round_id,
            at=now,
            until=now + policy.query_days * _DAY,
            minimum=plan.min_contributors,
            devices=places[new] if new else None,
        )
        moved = [
            each if each.devices is None else msgspec.structs.replace(each, devices=places[sets[each.devices]])
            for each in queries
        ]
        written = _Stored(queries=[*moved, made], sets=[b"".join(sorted(each)) for each in places])
        write_durably(self._path, encode(written))

    def _read(self) -> _Stored:
        kept = read_stored(self._path, _MAX_FILE_BYTES, "queries", _Stored, _REMEDY) or _Stored()
        if any(len(each) % _ID_BYTES for each in kept.sets) or any(
            each.devices is not None and each.devices >= len(kept.sets) for each in kept.queries
        ):
            raise ClientError(f"{self._path}: damaged (its sets are not those of its queries); {_REMEDY}")
        return kept


def _ids(joined: bytes) -> frozenset[bytes]:
    return frozenset(joined[start : start + _ID_BYTES] for start in range(0, len(joined), _ID_BYTES))


def _check_difference(plan: RoundPlan, minimum: int, different: int, earlier: Query) -> None:
    if 0 < different < minimum:
        raise PolicyError(
            f"plan {plan.round_id}: the devices in its sum differ by {different} from those of round "
            f"{earlier.round_id}; the two sums together would tell of these alone, so it must be none or at least "
            f"{minimum}"
        )
