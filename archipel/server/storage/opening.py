"""Opens the store that the setting `blobs` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archipel.errors import ServerError
from archipel.server.storage.folder import FolderStorage

if TYPE_CHECKING:
    from archipel.server.settings import Settings
    from archipel.server.storage.interface import Storage


def open_storage(settings: Settings) -> Storage:
    """The server's store. Nothing is read or written yet.

    Raises ServerError if the setting names a bucket and the extra for object stores is not installed.
    """
    if settings.bucket is None:
        return FolderStorage(settings.blob_folder)
    try:
        # Imported here, because the S3 client takes a second to load.
        from archipel.server.storage.s3 import Bucket
    except ModuleNotFoundError as error:
        raise ServerError(
            f"setting blobs: s3:// needs {error.name}, which is not installed: pip install 'archipel[s3]'"
        ) from None
    from archipel.server.storage.cache import BlobCache
    from archipel.server.storage.object_store import ObjectStorage

    name, prefix = settings.bucket
    return ObjectStorage(
        Bucket(name, prefix, connections=settings.threads + 4),
        BlobCache(settings.blob_cache, settings.blob_cache_bytes),
    )
