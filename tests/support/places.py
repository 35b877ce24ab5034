"""The two kinds of storage, each with a look from outside at what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from archipel.server.settings import Settings
from archipel.server.storage import Storage, open_storage
from archipel.server.storage.blobs import BlobStore
from archipel.server.storage.spool import UpdateSpool
from tests.support.moto_process import TestBucket
from tests.support.world import World


class Place:
    """Where a store's bytes lie, for a test that looks and does harm there."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.storage: Storage = open_storage(settings)
        self.storage.prepare()
        self.blobs = BlobStore(self.storage)
        self.spool = UpdateSpool(self.storage)

    def other_process(self) -> Place:
        """The same store as another process opens it."""
        return type(self)(self.settings)

    def other_machine(self) -> Place:
        """The same store as another server opens it, which has read nothing yet."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        """Everything that anybody could read, by key."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """What is half written, anywhere."""
        raise NotImplementedError

    def write(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def delete(self, key: str) -> None:
        raise NotImplementedError


class InFolder(Place):
    def files(self) -> dict[str, bytes]:
        root = self.settings.blob_folder
        found = (path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}

    def other_machine(self) -> InFolder:
        return InFolder(self.settings)

    def leftovers(self) -> list[str]:
        return [path.name for path in self.settings.blob_folder.rglob(".*")]

    def write(self, key: str, data: bytes) -> None:
        (self.settings.blob_folder / key).write_bytes(data)

    def delete(self, key: str) -> None:
        (self.settings.blob_folder / key).unlink()


class InBucket(Place):
    def __init__(self, settings: Settings, bucket: TestBucket) -> None:
        self.bucket = bucket
        super().__init__(settings)

    def other_process(self) -> InBucket:
        return InBucket(self.settings, self.bucket)

    def other_machine(self) -> InBucket:
        folder = Path(self.settings.folder).with_name("other")
        return InBucket(settings_of(folder, self.settings.blobs, self.settings.blob_cache_bytes), self.bucket)

    def files(self) -> dict[str, bytes]:
        return {key: data for key, data in self.bucket.objects().items() if key != "probe"}

    def leftovers(self) -> list[str]:
        return [*(path.name for path in self.settings.blob_cache.rglob(".*")), *self.bucket.uploads()]

    def write(self, key: str, data: bytes) -> None:
        self.bucket.put(key, data)

    def delete(self, key: str) -> None:
        self.bucket.delete(key)


def settings_of(folder: Path, blobs: str, cache_bytes: int = 4 << 30) -> Settings:
    folder.mkdir(parents=True, exist_ok=True)
    key = "ab" * 32
    return Settings(
        folder=str(folder), enrolment_key=key, publisher_keys=(key,), operator_token_sha256=key,
        blobs=blobs, blob_cache_bytes=cache_bytes,
    )  # fmt: skip


@dataclass
class WorldOnBucket(World):
    """A server whose files are in a bucket."""

    bucket: TestBucket | None = None

    def stored(self, folder: str) -> dict[str, bytes]:
        assert self.bucket is not None
        if folder == "incoming":
            return {path.name: path.read_bytes() for path in (self.settings.blob_cache / folder).iterdir()}
        found = self.bucket.objects().items()
        return {key.removeprefix(f"{folder}/"): data for key, data in found if key.startswith(f"{folder}/")}

    def damage(self, key: str) -> None:
        assert self.bucket is not None
        self.bucket.put(key, bytes(len(self.bucket.objects()[key])))
