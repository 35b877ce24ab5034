"""Sealed files for what is personal: tensors, state, and updates that wait to be sent.

A file has the 16 bytes `archipel-sealed1`, then the contents in XAES-256-GCM (lite_runtime/store/sealing.py) under a
key derived from the device's data key. The names of file and folder are the associated data, so that nobody can put one
sealed file in the place of another.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from archipel.durable import write_durably
from archipel.errors import ClientError
from archipel.lite_runtime.store.sealing import KEY_BYTES, NONCE_BYTES, OVERHEAD_BYTES, Sealer

_MAGIC = b"archipel-sealed1"
_LABEL = b"archipel/agent/1/files"
MAX_FILE_BYTES = 1 << 30


class Vault:
    """Writes and reads sealed files. `data_key` has 32 bytes (keystore.data_key)."""

    def __init__(self, data_key: bytes) -> None:
        # A key of its own by HKDF, because the seeds of rounds are derived from the data key, too.
        self._sealer = Sealer(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=_LABEL).derive(data_key))

    def write(self, path: Path, data: bytes) -> None:
        """Replace the file `path`, durably. Raises OSError."""
        write_durably(path, _MAGIC + self._sealer.seal(os.urandom(NONCE_BYTES), data, _place(path)))

    def read(self, path: Path) -> bytes | None:
        """The data that `write` sealed; None if there is no file. Raises ClientError for anything else."""
        try:
            with open(path, "rb") as file:
                # One byte more than allowed is enough to notice a larger file.
                sealed = file.read(MAX_FILE_BYTES + len(_MAGIC) + OVERHEAD_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
        if sealed.startswith(_MAGIC) and len(sealed) <= MAX_FILE_BYTES + len(_MAGIC) + OVERHEAD_BYTES:
            try:
                return self._sealer.open(sealed[len(_MAGIC) :], _place(path))
            except InvalidTag:
                pass
        raise ClientError(
            f"{path}: damaged, or sealed with another key than this device has; put the file or the key back, or "
            "remove the file: what it holds starts anew"
        )


def _place(path: Path) -> bytes:
    return f"{path.parent.name}/{path.name}".encode()
