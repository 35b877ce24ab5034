"""The queries (evaluations and analyses) of this device, so that no difference of two sums singles out a device.

The difference of two sums over sets of devices that differ by one device is what that device sent. So the book keeps
the devices of every query that this device confirmed, and the device confirms another query only if its devices are the
same or differ by at least `min_contributors`. The devices in exactly one of the two sets count (the symmetric
difference), because the difference of the sums consists of their parts alone. (One missing device does no harm if
enough others came: the difference is its part less the sum of theirs.)

What a tree of edge servers tells is the sum of its sites' sums. Each site compares its own alone, so a device that has
moved answers no query of the tree before those that it answered elsewhere are forgotten, nor the other way round.

The book also counts queries: the publisher's policy says how many there may be in how many days. Both are on disk
before the device sends its confirmation. A query counts whatever becomes of its round, because the device does not know
who else confirmed it.
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
from archipel.protocol.moments import moment
from archipel.protocol.sealed import encode

FILE = "queries"
_ID_BYTES = 16
_MAX_FILE_BYTES = MAX_QUERIES * (2 * MAX_COHORT * _ID_BYTES + 1024)
_DAY = 86400.0
# A damaged book stops all queries until the owner acts: what it had in it is what protects this device.
_REMEDY = "remove it, and what earlier queries were about is forgotten"


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of one round.

    `devices` is the index of the set of its devices in the book's `sets`; None for a plain round, whose updates the
    server saw anyway. The book keeps it from `at` to `until` (Unix seconds); `minimum` is the plan's min_contributors.
    `server` is the key of the server whose round it was, and `tree` says whether a tree of servers tells its sum.
    """

    round_id: RoundId
    at: float
    until: float
    minimum: Annotated[int, msgspec.Meta(ge=0)]
    devices: Annotated[int, msgspec.Meta(ge=0)] | None
    server: Annotated[str, msgspec.Meta(max_length=64)] = ""
    tree: bool = False


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. A set has its devices' ids, sorted, 16 bytes each, and is stored once: most queries repeat one."""

    queries: Annotated[list[Query], msgspec.Meta(max_length=MAX_QUERIES)] = []
    sets: Annotated[list[bytes], msgspec.Meta(max_length=MAX_QUERIES)] = []


class QueryBook:
    """The queries of one device, in the file `queries` of `folder`.

    There is one book for all bundles, because several bundles can ask the same question.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / FILE
        self._clock = clock

    def check(self, plan: RoundPlan, policy: PrivacyPolicy, server_key: bytes) -> None:
        """Raises PolicyError if the policy allows no further query now, or none of this server; ClientError if the book
        is damaged. `server_key`: that of the server whose round it is."""
        now = self._clock()
        since = now - policy.query_days * _DAY
        # Queries with a time in the future count, too: the clock was set back, and nobody knows how far.
        queries = [query for query in self._read().queries if query.round_id != plan.round_id]
        spent = sum(query.at > since for query in queries)
        # Another bundle's policy may keep queries for longer, and the file has a limit.
        full = sum(query.until > now for query in queries) >= MAX_QUERIES
        if spent >= policy.queries or full:
            raise PolicyError(
                f"plan {plan.round_id}: this device was in {spent} evaluations and analyses in the last "
                f"{policy.query_days} days, the publisher allows {policy.queries}"
            )
        for query in queries:
            elsewhere = query.devices is not None and query.server not in ("", server_key.hex())
            if query.until > now and elsewhere and (query.tree or _of_tree(plan)):
                raise PolicyError(
                    f"plan {plan.round_id}: this device was in round {query.round_id} of another edge server, and no "
                    f"server compares the two sums; it answers here from {moment(query.until)} on"
                )

    def add(
        self,
        plan: RoundPlan,
        policy: PrivacyPolicy,
        devices: Sequence[str],
        server_key: bytes,
        *,
        minimum: int | None = None,
    ) -> None:
        """Record the query of a round with the ids of its members (none for a plain round). Durable when it returns.

        The members must be the same as in each earlier query, or differ from them by `minimum` (None: the plan's
        `min_contributors`), or that of the earlier query, whichever is larger. Raises PolicyError if they differ by
        less, and what `check` raises.
        """
        self.check(plan, policy, server_key)
        minimum = plan.min_contributors if minimum is None else minimum
        now, stored = self._clock(), self._read()
        queries = [query for query in stored.queries if query.until > now and query.round_id != plan.round_id]
        sets = {query.devices: _split_ids(stored.sets[query.devices]) for query in queries if query.devices is not None}
        # The size of the symmetric difference: see the file's description.
        new = frozenset(bytes.fromhex(device) for device in devices)
        if new:
            for query in queries:
                if query.devices is not None:
                    different = len(new ^ sets[query.devices])
                    _check_difference(plan, max(minimum, query.minimum), different, query)
        # Sets without a query are left out, so the indices of the others change.
        places: dict[frozenset[bytes], int] = {}
        for members in (*sets.values(), *([new] if new else [])):
            places.setdefault(members, len(places))
        added = Query(
            round_id=plan.round_id,
            at=now,
            until=now + policy.query_days * _DAY,
            minimum=minimum,
            devices=places[new] if new else None,
            server=server_key.hex(),
            tree=_of_tree(plan),
        )
        moved = [
            query if query.devices is None else msgspec.structs.replace(query, devices=places[sets[query.devices]])
            for query in queries
        ]
        changed = _Stored(queries=[*moved, added], sets=[b"".join(sorted(members)) for members in places])
        write_durably(self._path, encode(changed))

    def _read(self) -> _Stored:
        stored = read_stored(self._path, _MAX_FILE_BYTES, "queries", _Stored, _REMEDY) or _Stored()
        if any(len(members) % _ID_BYTES for members in stored.sets) or any(
            query.devices is not None and query.devices >= len(stored.sets) for query in stored.queries
        ):
            raise ClientError(f"{self._path}: damaged (its sets are not those of its queries); {_REMEDY}")
        return stored


def _of_tree(plan: RoundPlan) -> bool:
    return plan.levels > 0 or plan.origin is not None


def _split_ids(joined: bytes) -> frozenset[bytes]:
    return frozenset(joined[start : start + _ID_BYTES] for start in range(0, len(joined), _ID_BYTES))


def _check_difference(plan: RoundPlan, minimum: int, different: int, earlier: Query) -> None:
    if 0 < different < minimum:
        raise PolicyError(
            f"plan {plan.round_id}: the devices in its sum differ by {different} from those of round "
            f"{earlier.round_id}; the two sums together would tell of these alone, so it must be none or at least "
            f"{minimum}"
        )
