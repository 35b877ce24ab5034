"""Where the server's files are: a folder, or a bucket of an object store."""

from archipel.server.storage.folder import FolderStorage
from archipel.server.storage.interface import BLOBS, INCOMING, PARTS, UPDATES, Storage, StorageUnreachableError
from archipel.server.storage.opening import open_storage

__all__ = [
    "BLOBS",
    "INCOMING",
    "PARTS",
    "UPDATES",
    "FolderStorage",
    "Storage",
    "StorageUnreachableError",
    "open_storage",
]
