"""The key file of an example store: a random data key, wrapped under the caller's key.

136 bytes: `archipel-store-1` (16), the store's id (16), a salt (32), and the data key (32) sealed with XAES-256-GCM
(72) under HKDF-SHA256(caller's key, salt, label), with everything before it as associated data. The key has a file of
its own, because destroying these 136 bytes makes every example unreadable, also in copies of the database elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from archipel.errors import StoreError, StoreKeyError
from archipel.lite_runtime.store.sealing import KEY_BYTES, NONCE_BYTES, OVERHEAD_BYTES, Sealer

KEY_FILE = "store.key"
ID_BYTES = 16
RECORD_BYTES = 16 + ID_BYTES + 32 + KEY_BYTES + OVERHEAD_BYTES

_FAMILY = b"archipel-store-"
_MAGIC = _FAMILY + b"1"
_HEAD_BYTES = 16 + ID_BYTES + 32
_LABEL = b"archipel/example-store/1/wrap"


class StoreKeys(NamedTuple):
    """The key file: `record` has its bytes, `store` the store's id; `data_key` seals the examples."""

    record: bytes
    store: bytes
    data_key: bytes

    # Without the key: a repr ends up in logs and tracebacks.
    def __repr__(self) -> str:
        return f"StoreKeys(store={self.store.hex()})"


def check_key(key: object) -> bytes:
    """Raises StoreKeyError unless `key` is 32 bytes."""
    if not isinstance(key, bytes | bytearray | memoryview) or len(bytes(key)) != KEY_BYTES:
        got = f"{len(bytes(key))} bytes" if isinstance(key, bytes | bytearray | memoryview) else type(key).__name__
        raise StoreKeyError(
            f"example store: the key must be {KEY_BYTES} random bytes (a password is not one), got {got}; "
            "make it once with os.urandom(32) and leave it to the system's key store"
        )
    return bytes(key)


def make_record(key: bytes, random: bytes) -> bytes:
    """The key file of a new store. `random` are 16 + 32 + 32 + 24 secret random bytes: id, salt, data key, nonce."""
    store, salt, data_key, nonce = (
        random[:16], random[16:48], random[48:80], random[80:104],
    )  # fmt: skip
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"104 random bytes, got {len(random)}")
    # The head is authenticated too, so that a data key cannot be moved to another store's file.
    head = _MAGIC + store + salt
    return head + Sealer(_wrapping_key(key, salt)).seal(nonce, data_key, head)


def open_record(record: bytes, key: bytes, where: str) -> StoreKeys:
    """Unwrap the data key. Raises StoreKeyError for a wrong `key`, StoreError if `record` is not a key file."""
    # Two checks: a later format deserves another message than a file that was never a key file.
    if len(record) != RECORD_BYTES or not record.startswith(_FAMILY):
        raise StoreError(f"{where}: not the key file of an example store ({RECORD_BYTES} bytes, {_MAGIC!r} first)")
    if not record.startswith(_MAGIC):
        raise StoreError(
            f"{where}: format {record[15:16]!r} of example stores is not known here, expected b'1'; update archipel"
        )
    head = record[:_HEAD_BYTES]
    try:
        data_key = Sealer(_wrapping_key(key, head[32:])).open(record[_HEAD_BYTES:], head)
    except InvalidTag:
        raise StoreKeyError(
            f"{where}: the key given does not open this store (or the file was damaged); nothing was changed. "
            "Open it with the key it was made with; if that is lost, ExampleStore.destroy(path) makes room for another"
        ) from None
    return StoreKeys(record, head[16:32], data_key)


def read_record(folder: Path) -> bytes | None:
    """The key file's bytes, at most one more than a record has; None without the file. Raises StoreError."""
    path = folder / KEY_FILE
    try:
        # A link here could point to a copy that survives an erase.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return os.read(handle, RECORD_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    finally:
        os.close(handle)


def _wrapping_key(key: bytes, salt: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=_LABEL).derive(key)
