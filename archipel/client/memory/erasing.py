"""Erasing a device: its data key first, so that nothing personal can be read any more, then everything else it made.

`erasing` in the folder says that this was begun; whoever uses the folder next finishes it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from archipel.client.memory.folder import lock_folder
from archipel.client.memory.keystore import DATA_KEY, SECRETS, FileKeys, KeyStore
from archipel.durable import remove_durably, sweep, sync_folder, write_durably
from archipel.errors import ClientError

MARK = "erasing"
EXAMPLES = "examples"
# The agent's own, and nothing else: the folder may be anybody's.
_FOLDERS = (EXAMPLES, "state", "rounds", "models", "cache", "origins")
_FILES = ("device.json", "paused", "adoption.json", "decisions.json")


def erase(folder: Path, keys: KeyStore | None = None) -> None:
    """Destroy the device's keys, examples, personal tensors, models and journal in `folder`. Durable when it returns.

    Killed before the first step the device is whole; after it, the next agent in the folder finishes. It has to enrol
    anew afterwards. Raises ClientError where there is no such folder or an agent uses it.
    """
    if not folder.is_dir():
        raise ClientError(f"{folder}: no such folder; give the one of the device's settings")
    lock = lock_folder(folder)
    try:
        write_durably(folder / MARK, b"")
        finish_erasing(folder, FileKeys(folder) if keys is None else keys)
    finally:
        os.close(lock)


def finish_erasing(folder: Path, keys: KeyStore) -> bool:
    """Do what an erase that was begun still has to do; whether there was one. The folder's lock is held."""
    if not (folder / MARK).exists():
        return False
    keys.delete(DATA_KEY)
    if (folder / EXAMPLES).is_dir():
        from archipel.lite_runtime.store.example_store import ExampleStore

        # Apps may have it open: they find out, and cannot go on.
        ExampleStore.destroy(folder / EXAMPLES)
    for secret in SECRETS:
        keys.delete(secret)
    for name in _FOLDERS:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    sweep(folder)
    sync_folder(folder)
    remove_durably(folder / MARK)
    return True
