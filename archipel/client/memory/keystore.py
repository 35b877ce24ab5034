"""Where a device keeps its secrets: files that only the owner reads, or what the caller gives, as a phone's key store.

device.key       the identity's private key, PEM
device.key.next  the one that is to replace it, while that is under way
data.key         32 random bytes, under which everything personal on the disk is sealed
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from archipel.durable import overwrite, remove_durably, write_durably
from archipel.errors import ClientError

DEVICE_KEY = "device.key"
NEXT_DEVICE_KEY = "device.key.next"
DATA_KEY = "data.key"
SECRETS = (DATA_KEY, NEXT_DEVICE_KEY, DEVICE_KEY)
DATA_KEY_BYTES = 32
MAX_SECRET_BYTES = 16 << 10


class KeyStore(Protocol):
    """Secrets by name, from one process at a time. What `store` and `delete` did is durable when they return.

    Errors that are raised on purpose should be ClientErrors: these are shown in one line.
    """

    def load(self, name: str) -> bytes | None:
        """The secret, None where there is none."""
        ...

    def store(self, name: str, secret: bytes) -> None:
        """Keep it, in place of the one before: there is the old one or the new one at any time."""
        ...

    def delete(self, name: str) -> None:
        """Destroy it; nothing happens where there is none."""
        ...


class FileKeys:
    """One file of mode 0600 for each secret, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> bytes | None:
        """Raises ClientError where others may read the file, or it cannot be read."""
        path = self._folder / name
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777
                secret = file.read(MAX_SECRET_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
        if mode & 0o077:
            raise ClientError(f"{path}: mode {mode:o} lets others read the device's key; run: chmod 600 {path}")
        if len(secret) > MAX_SECRET_BYTES:
            raise ClientError(f"{path}: larger than {MAX_SECRET_BYTES} bytes, so not a key file")
        return secret

    def store(self, name: str, secret: bytes) -> None:
        write_durably(self._folder / name, secret, 0o600)

    def delete(self, name: str) -> None:
        """Overwrites it first, where it lies. Flash and copy-on-write file systems may keep the old blocks for a while:
        there the secret belongs in the system's key store."""
        path = self._folder / name
        if overwrite(path):
            remove_durably(path)


def data_key(keys: KeyStore) -> bytes:
    """The 32 bytes of DATA_KEY, made on the first call. Raises ClientError where they are not 32."""
    key = keys.load(DATA_KEY)
    if key is None:
        keys.store(DATA_KEY, os.urandom(DATA_KEY_BYTES))
        key = keys.load(DATA_KEY)
    if key is None or len(key) != DATA_KEY_BYTES:
        raise ClientError(
            f"{DATA_KEY}: {0 if key is None else len(key)} bytes, a key of {DATA_KEY_BYTES} was stored; what it sealed "
            "is lost without it: `archipel device erase` makes room for a new start"
        )
    return key
