"""Erasing a device: first its data key, without which nothing personal can be read, then everything else of the agent.

The file `erasing` in the folder marks an erase that has begun; the next agent in the folder finishes it.
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
# Only what the agent makes: the owner may keep other files in the folder.
_FOLDERS = (EXAMPLES, "state", "rounds", "models", "cache", "origins", "edges")
_FILES = ("device.json", "paused", "adoption.json", "decisions.json")


def erase(folder: Path, keys: KeyStore | None = None) -> None:
    """Destroy a device's keys, examples, personal tensors, models and journal. Durable when it returns.

    After a kill either nothing is erased, or the next agent in the folder finishes the erase. The device has to enrol
    again afterwards.

    Arguments:
        folder: the device's folder; files that the agent did not make stay.
        keys: the store of the device's secrets; None: the files in the folder.

    Raises:
        ClientError: there is no such folder, or an agent uses it.

    Example:
        erase(Path("device"))
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
    """Finish an erase that has begun; returns whether there was one. The caller holds the folder's lock."""
    if not (folder / MARK).exists():
        return False
    # The data key first: from here on all sealed files are unreadable, even if the rest takes long or is interrupted.
    keys.delete(DATA_KEY)
    if (folder / EXAMPLES).is_dir():
        from archipel.lite_runtime.store.example_store import ExampleStore

        # Apps may have the store open; `destroy` makes their next access fail.
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
    # The mark last, and after a sync: its absence says that everything else is gone, also after a power cut.
    remove_durably(folder / MARK)
    return True
