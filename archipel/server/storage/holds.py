"""Holds: while one lasts, no blob's file is removed from the store (archipel.server.retention).

A hold is an empty file backups/EXPIRES-ID in the store itself, so that all servers and commands that reach the files
see it. It expires, so that a killed backup does not keep files for ever.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from archipel.server.storage.interface import Storage

FOLDER = "backups"
SECONDS = 6 * 3600.0
"""How long a hold lasts that nobody renews."""
_RENEW_SECONDS = 60.0


@contextmanager
def holding(storage: Storage) -> Iterator[Callable[[], None]]:
    """Keep every file in the store until the block ends, and give a function that the block calls while it works.

    Raises OSError if the store cannot be written.
    """
    name, renewed = secrets.token_hex(8), time.monotonic()
    key = _put(storage, name)

    def renew() -> None:
        nonlocal key, renewed
        if time.monotonic() - renewed >= _RENEW_SECONDS:
            # The new one first: there is no moment without a hold.
            before, key, renewed = key, _put(storage, name), time.monotonic()
            storage.remove({before} - {key})

    try:
        yield renew
    finally:
        storage.remove([key])


def is_held(storage: Storage) -> bool:
    """Whether files must stay now. Removes holds that have expired."""
    held = False
    for key in list(storage.keys(FOLDER)):
        expires = key.rpartition("/")[2].partition("-")[0]
        if expires.isdecimal() and int(expires) <= time.time():
            storage.remove([key])
        else:
            held = True
    return held


def _put(storage: Storage, name: str) -> str:
    key = f"{FOLDER}/{int(time.time() + SECONDS)}-{name}"
    storage.make_folder(FOLDER)
    storage.keep(storage.receive(FOLDER, (b"",)), key)
    return key
