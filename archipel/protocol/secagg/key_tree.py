"""A Merkle tree over a device's public keys: the device signs one root for its keys for all possible senders.

The plan fixes the number of leaves (`max_cohort`); the tree is filled up to a power of two, so that every path has the
same length. Leaves and nodes are hashed under different labels, so that a leaf cannot be passed off as a node.
"""

from __future__ import annotations

import hashlib

from archipel.errors import MessageError

KEY_BYTES = 32
_EMPTY = bytes(KEY_BYTES)


class KeyTree:
    """The tree of `keys`, 32 bytes each, one after the other. Raises MessageError for another length."""

    def __init__(self, keys: bytes, leaves: int) -> None:
        if len(keys) != KEY_BYTES * leaves:
            raise MessageError(
                f"envelope keys: expected {leaves} of {KEY_BYTES} bytes, one for each possible sender, got {len(keys)} "
                "bytes"
            )
        self._keys = keys
        # Level 0 has the leaves' hashes, the last level the root; each level is one run of 32-byte hashes.
        level = b"".join(_leaf(keys[start : start + KEY_BYTES]) for start in range(0, len(keys), KEY_BYTES))
        self._levels = [level + _EMPTY * ((1 << depth(leaves)) - leaves)]
        while len(self._levels[-1]) > KEY_BYTES:
            level = self._levels[-1]
            pairs = (level[start : start + 2 * KEY_BYTES] for start in range(0, len(level), 2 * KEY_BYTES))
            self._levels.append(b"".join(_node(pair) for pair in pairs))

    @property
    def root(self) -> bytes:
        return self._levels[-1]

    @property
    def size(self) -> int:
        """Bytes of the keys and hashes that it holds."""
        return len(self._keys) + sum(map(len, self._levels))

    def key(self, index: int) -> bytes:
        """The public key at `index`, from 0."""
        return self._keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]

    def path(self, index: int) -> bytes:
        """The siblings on the way from the leaf at `index` to the root, 32 bytes each."""
        siblings = []
        for level in self._levels[:-1]:
            # Two siblings differ in the lowest bit of their index, and their parent's index is what lies above it.
            start = KEY_BYTES * (index ^ 1)
            siblings.append(level[start : start + KEY_BYTES])
            index >>= 1
        return b"".join(siblings)


def depth(leaves: int) -> int:
    """The number of siblings in a path."""
    return (leaves - 1).bit_length()


def is_under(root: bytes, key: bytes, index: int, path: bytes, leaves: int) -> bool:
    """Whether `path` leads from `key` at `index` of `leaves` to `root`."""
    if not 0 <= index < leaves or len(path) != KEY_BYTES * depth(leaves):
        return False
    node = _leaf(key)
    for start in range(0, len(path), KEY_BYTES):
        sibling = path[start : start + KEY_BYTES]
        # An odd index is the right one of its pair.
        node = _node(sibling + node if index & 1 else node + sibling)
        index >>= 1
    return node == root


def _leaf(key: bytes) -> bytes:
    return hashlib.sha256(b"archipel/v1/envelope-leaf\0" + key).digest()


def _node(pair: bytes) -> bytes:
    return hashlib.sha256(b"archipel/v1/envelope-node\0" + pair).digest()
