"""The chain of the audit log: its hashes, and the check that whoever has the log can make for themselves.

hash = SHA-256 of the entry's other fields as JSON: keys sorted, no blanks, UTF-8
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from archipel.errors import AuditError
from archipel.protocol.operator.tasks import AuditEntry

FIRST = "0" * 64
"""What the first entry has for the hash of the one before."""


def entry_hash(fields: dict[str, Any]) -> str:
    """Of all fields but `hash`."""
    plain = {name: value for name, value in fields.items() if name != "hash"}
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    ).hexdigest()


def verify(entries: Iterable[AuditEntry], *, heads: Iterable[tuple[int, str]] = ()) -> tuple[int, str]:
    """Check a whole log, oldest first, and that it still holds the `heads` (number and hash) that were kept elsewhere.

    Returns the log's own head. Raises AuditError that names the first entry that is wrong.
    """
    # Two heads of one number are both held to: the present head must not take the place of one that was kept.
    kept: dict[int, set[str]] = {}
    for number, digest in heads:
        kept.setdefault(number, set()).add(digest)
    seq, previous = 0, FIRST
    for entry in entries:
        if entry.seq != seq + 1:
            raise AuditError(f"audit log: entry {seq + 1} is missing; after {seq} comes {entry.seq}")
        if entry.previous != previous:
            raise AuditError(f"audit log: entry {entry.seq} does not follow entry {seq}")
        if entry_hash(msgspec.to_builtins(entry)) != entry.hash:
            raise AuditError(f"audit log: entry {entry.seq} ({entry.action} {entry.subject}) was changed")
        seq, previous = entry.seq, entry.hash
        if kept.pop(seq, {previous}) != {previous}:
            raise AuditError(f"audit log: entry {seq} is not the one that was kept: the log was made anew")
    if kept:
        raise AuditError(f"audit log: it ends at entry {seq}, but entry {max(kept)} was there when the head was kept")
    return seq, previous
