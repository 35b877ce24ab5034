"""A Merkle tree over a cohort: one hash stands for all members, and a proof for the few that somebody drew.

A device learns the root and the number of members, then draws places at random, and only then gets the members there.
So the server cannot choose who is at a place once it knows who asks. The proof of k members of n has about
k log2(n / k) hashes, where a path for each would have k log2 n.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from archipel.errors import ConsistencyError

HASH_BYTES = 32
_EMPTY = bytes(HASH_BYTES)


def hash_member(member: bytes) -> bytes:
    """The leaf of a member, as the server sends it."""
    return hashlib.sha256(b"archipel/v2/member\0" + member).digest()


class MemberTree:
    """The tree over the hashes of all members, in the order of their places from 0."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._size = len(leaves)
        # Filled up to a power of two, so that every place has a sibling on every level.
        level = [*leaves, *[_EMPTY] * ((1 << _depth(self._size)) - self._size)]
        self._places = len(level)
        nodes = level
        while len(level) > 1:
            level = [_node(level[i], level[i + 1]) for i in range(0, len(level), 2)]
            nodes = nodes + level
        # Level after level, the leaves first.
        self._nodes = np.frombuffer(b"".join(nodes), np.uint8).reshape(-1, HASH_BYTES)
        self.root = _top(level[0], self._size)

    def prove(self, places: Sequence[int]) -> bytes:
        """The hashes by which the members at `places` (distinct, in any order) lead to the root."""
        # All nodes at once: a server makes a proof for every device.
        known = np.zeros(len(self._nodes), bool)
        known[places] = True
        start, count = 0, self._places
        while count > 1:
            stop = start + count
            np.logical_or(known[start:stop:2], known[start + 1 : stop : 2], out=known[stop : stop + count // 2])
            start, count = stop, count // 2
        first, second = known[:-1:2], known[1::2]
        half = np.flatnonzero(first != second)
        # Of a pair of which one is known, the other.
        return self._nodes.take(2 * half + first[half], axis=0).tobytes()


def check_members(root: bytes, size: int, leaves: Mapping[int, bytes], proof: bytes) -> None:
    """Raises ConsistencyError unless `leaves`, by place, are those of the cohort of `size` members under `root`."""
    if not leaves or min(leaves) < 0 or max(leaves) >= size or len(proof) % HASH_BYTES:
        raise ConsistencyError("cohort: members at places that it does not have, or a proof of broken hashes")
    given = iter(proof[start : start + HASH_BYTES] for start in range(0, len(proof), HASH_BYTES))
    level = dict(leaves)
    try:
        for _ in range(_depth(size)):
            level = _climb(level, given)
    except StopIteration:
        raise ConsistencyError("cohort: the proof of its members is too short") from None
    if next(given, None) is not None:
        raise ConsistencyError("cohort: the proof of its members is too long")
    if _top(level[0], size) != root:
        raise ConsistencyError("cohort: these members are not those that its root stands for")


def _climb(level: Mapping[int, bytes], given: Iterator[bytes]) -> dict[int, bytes]:
    siblings = {place ^ 1: next(given) for place in sorted(level) if place ^ 1 not in level}
    whole = {**level, **siblings}
    return {place >> 1: _node(whole[place & ~1], whole[place | 1]) for place in level}


def _depth(size: int) -> int:
    return (size - 1).bit_length()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"archipel/v2/member-node\0" + left + right).digest()


def _top(node: bytes, size: int) -> bytes:
    # With the size: an empty place cannot be passed off as a member, or the other way round.
    return hashlib.sha256(b"archipel/v2/cohort\0" + size.to_bytes(4, "big") + node).digest()
