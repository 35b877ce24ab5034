"""A part of a population: the devices for which an expression is true, and of those so many percent.

Which ones is decided by a keyed hash of the device's id alone, so whoever asks, and whenever, hears the same: the
devices of 10 percent are among those of 50 percent, and under another key they are others. The key never leaves the
server, so that nobody can choose an id that is among the first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from archipel.protocol.eligibility import Attributes, parse_eligibility

_HASH_BYTES: Final = 6
_PURPOSE: Final = b"archipel/percent"
_parsed = lru_cache(maxsize=256)(parse_eligibility)


def place(salt: str, device_id: str) -> float:
    """Where the device stands in [0, 100): uniform over devices, and over `salt` (hexadecimal, at most 64 bytes)."""
    key = bytes.fromhex(salt)
    digest = hashlib.blake2b(device_id.encode(), digest_size=_HASH_BYTES, key=key, person=_PURPOSE).digest()
    # 48 bits: exact in floating point, so the highest place stays below 100.
    return int.from_bytes(digest, "big") * 100 / (1 << 8 * _HASH_BYTES)


@dataclass(frozen=True)
class Target:
    """Of the devices for which `eligibility` is true those whose place is below `percent`; without `salt` all."""

    eligibility: str = ""
    salt: str | None = None
    percent: float | None = None

    @property
    def everybody(self) -> bool:
        """Whether nothing about a device matters."""
        return self.salt is None and not _parsed(self.eligibility).names

    def takes(self, device_id: str, attributes: Attributes) -> bool:
        """Whether the device is among them, with what it reported."""
        if self.salt is not None and self.percent is not None and place(self.salt, device_id) >= self.percent:
            return False
        return _parsed(self.eligibility)(attributes)
