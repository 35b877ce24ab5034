"""The tree over a cohort: proofs of a few members, and what they refuse."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.errors import ConsistencyError
from archipel.protocol.secagg_plus.tree import MemberTree, check_members, hash_member

LEAVES = [hash_member(bytes([i])) for i in range(11)]


def root_by_hand(leaves: Sequence[bytes]) -> bytes:
    """The root by its definition, level by level."""
    level = list(leaves)
    while len(level) & (len(level) - 1):
        level.append(bytes(32))
    while len(level) > 1:
        level = [
            hashlib.sha256(b"archipel/v2/member-node\0" + one + other).digest()
            for one, other in zip(level[::2], level[1::2])
        ]
    return hashlib.sha256(b"archipel/v2/cohort\0" + len(leaves).to_bytes(4, "big") + level[0]).digest()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 11])
def test_the_root_is_that_of_the_definition(size: int) -> None:
    assert MemberTree(LEAVES[:size]).root == root_by_hand(LEAVES[:size])


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_any_members_lead_to_the_root(drawn: tuple[int, set[int]]) -> None:
    size, places = drawn
    leaves = [hash_member(bytes([i])) for i in range(size)]
    tree = MemberTree(leaves)
    check_members(tree.root, size, {place: leaves[place] for place in places}, tree.prove(sorted(places)))


def test_a_proof_of_few_among_many_is_shorter_than_their_paths() -> None:
    leaves = [hash_member(i.to_bytes(2, "big")) for i in range(1024)]
    places = range(5, 1024, 9)
    proof = MemberTree(leaves).prove(places)
    assert len(places) == 114
    assert len(proof) < len(places) * 32 * 4 < len(places) * 32 * 10


def refuse(match: str, root: bytes, size: int, leaves: dict[int, bytes], proof: bytes) -> None:
    with pytest.raises(ConsistencyError, match=match):
        check_members(root, size, leaves, proof)


def test_what_is_not_in_the_cohort_is_refused() -> None:
    tree = MemberTree(LEAVES)
    root, size = tree.root, len(LEAVES)
    leaves, proof = {3: LEAVES[3], 7: LEAVES[7]}, tree.prove([3, 7])
    check_members(root, size, leaves, proof)
    refuse("not those", root, size, {3: LEAVES[7], 7: LEAVES[3]}, proof)
    refuse("not those", root, size, {3: LEAVES[3], 6: LEAVES[7]}, proof)
    refuse("not those", root, size, leaves, bytes(32) + proof[32:])
    # A cohort of another size has another root, also where the tree has the same depth.
    refuse("not those", root, size - 1, leaves, proof)
    refuse("too short", root, size, leaves, proof[:-32])
    refuse("too long", root, size, leaves, proof + bytes(32))
    refuse("broken", root, size, leaves, proof[:-1])
    refuse("does not have", root, size, {11: bytes(32)}, tree.prove([11]))
    refuse("does not have", root, size, {-1: LEAVES[0]}, proof)
    refuse("does not have", root, size, {}, proof)
