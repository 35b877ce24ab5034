"""What all messages are made of: types with their bounds, limits, and the strict base class."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
# Python's `$` also matches before a final newline; the lengths and the look-ahead exclude that.
Digest = Annotated[str, Meta(max_length=64, pattern="^[0-9a-f]{64}$")]
DeviceId = Annotated[str, Meta(max_length=32, pattern="^[0-9a-f]{32}$")]
RoundId = Annotated[str, Meta(max_length=32, pattern="^[0-9a-f]{32}$")]
BearerToken = Annotated[str, Meta(max_length=1024, pattern="^[A-Za-z0-9._~+/=-]+$(?!\\n)")]
"""It becomes part of an HTTP header, so it must have no character that ends one."""
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$(?!\\n)")]

# Integers up to this are exact in every JSON reader, also in JavaScript, whose numbers are float64.
Whole = Annotated[int, Meta(ge=0, le=2**53 - 1)]

MetricName = Annotated[str, Meta(min_length=1, max_length=128)]
Metrics = Annotated[dict[MetricName, Annotated[float, Meta(gt=0, le=1e30)]], Meta(max_length=64)]
"""Names of an `evaluate` program's metrics, each with the bound of its absolute value."""

MAX_COHORT = 4096
KEY_PATH_BYTES = 12 * 32
"""The longest Merkle path, to one of MAX_COHORT = 2^12 keys."""
MAX_ROTATIONS = 8
"""How often a device may replace its key. Bounded, as every peer in a cohort checks the whole chain."""
MAX_PIECES = 4096
"""Pieces of one file."""
PART_BYTES = 1 << 20
"""Of an update that is uploaded in parts: a connection that breaks costs no more, and proxies take bodies that long."""
MAX_PARTS = 4096
"""Of one update."""
MAX_ENTRIES = 256
"""Entries of a weights log in one answer."""
MAX_MODELS = 16
"""Models of one population, and so on one device."""
MAX_REVOKED = 14_000
"""Devices, and as many tokens, in one list of revocations, so that it fits into a sealed statement."""
MAX_REVOCATION_BYTES = 2 << 20
VersionNumber = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages. Unknown fields are an error."""
