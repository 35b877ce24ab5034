"""Selects a part of a population: the devices for which an expression is true, and of those a percentage.

A keyed hash of a device's id decides whether it belongs to the percentage, so the answer is always the same. The
devices of 10 percent are among those of 50 percent; with another key they are different devices. The key never leaves
the server, so that nobody can choose an id that is taken first.
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
    """The device's place in [0, 100), uniform over devices and over keys. `salt` is the key: hex, at most 64 bytes."""
    key = bytes.fromhex(salt)
    digest = hashlib.blake2b(device_id.encode(), digest_size=_HASH_BYTES, key=key, person=_PURPOSE).digest()
    # 48 bits are exact in floating point, so the highest place stays below 100 and 100 percent takes every device.
    return int.from_bytes(digest, "big") * 100 / (1 << 8 * _HASH_BYTES)


@dataclass(frozen=True)
class Target:
    """The devices for which `eligibility` is true and, with a `salt`, whose place is below `percent`."""

    eligibility: str = ""
    salt: str | None = None
    percent: float | None = None

    @property
    def everybody(self) -> bool:
        """Whether every device is taken, whatever it reports."""
        return self.salt is None and not _parsed(self.eligibility).names

    def takes(self, device_id: str, attributes: Attributes) -> bool:
        """Whether a device with these attributes is taken."""
        if self.salt is not None and self.percent is not None and place(self.salt, device_id) >= self.percent:
            return False
        return _parsed(self.eligibility)(attributes)
