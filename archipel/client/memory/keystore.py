"""Where a device keeps its secrets: in files that only the owner can read, or in a store of the caller's.

device.key       the private key of the device's identity, PEM
device.key.next  the key that replaces it, during a key rotation
data.key         32 random bytes; keys derived from them seal everything personal on the disk
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
    """A store of secrets by name, such as a phone's key store. One process at a time uses it.

    What `store` and `delete` did must be durable when they return. Expected failures should be ClientErrors, which the
    command shows in one line.

    Example:
        class Keyring:
            def load(self, name):
                return secrets.get(name)

            def store(self, name, secret):
                secrets[name] = secret

            def delete(self, name):
                secrets.pop(name, None)

        secrets = {}
        key = data_key(Keyring())
    """

    def load(self, name: str) -> bytes | None:
        """The secret; None if there is none."""
        ...

    def store(self, name: str, secret: bytes) -> None:
        """Store a secret, and replace an older one. After a kill there must be the old one or the new one."""
        ...

    def delete(self, name: str) -> None:
        """Destroy a secret. Does nothing if there is none."""
        ...


class FileKeys:
    """A KeyStore of files: one of mode 0600 in `folder` for each secret, which is at most 16 KiB.

    Example:
        keys = FileKeys(Path("device"))
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> bytes | None:
        """The secret; None if there is none. Raises ClientError if others may read the file, or nobody can."""
        path = self._folder / name
        try:
            with open(path, "rb") as file:
                # The mode of the opened file: `path` could name another file by the time of a second look-up.
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
        """Write the secret to a file that its owner alone can read. Raises OSError."""
        write_durably(self._folder / name, secret, 0o600)

    def delete(self, name: str) -> None:
        """Overwrite the file in place, then remove it.

        Flash and copy-on-write file systems may keep the old blocks for a while; there a secret belongs in the system's
        key store.
        """
        path = self._folder / name
        if overwrite(path):
            remove_durably(path)


def data_key(keys: KeyStore) -> bytes:
    """The device's data key: 32 random bytes, made on the first call, as in `data_key(FileKeys(Path("device")))`.

    Raises ClientError if the stored key does not have 32 bytes, or cannot be read.

    Example:
        secret = data_key(FileKeys(Path("device")))
    """
    key = keys.load(DATA_KEY)
    if key is None:
        keys.store(DATA_KEY, os.urandom(DATA_KEY_BYTES))
        # What the store gives back is what counts: a store that loses secrets must fail now, and not when sealed files
        # can no longer be read.
        key = keys.load(DATA_KEY)
    if key is None or len(key) != DATA_KEY_BYTES:
        raise ClientError(
            f"{DATA_KEY}: {0 if key is None else len(key)} bytes, a key of {DATA_KEY_BYTES} was stored; what it sealed "
            "is lost without it: `archipel device erase` makes room for a new start"
        )
    return key
