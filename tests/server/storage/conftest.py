"""The two kinds of storage, each with a look from outside at what is in it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from archipel.server.http.app import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import Settings, load_settings
from archipel.server.storage import Storage, open_storage
from archipel.server.storage.blobs import BlobStore
from archipel.server.storage.spool import UpdateSpool
from tests.server.conftest import Clock, Keys, World
from tests.server.storage.moto_process import MotoProcess, TestBucket
from tests.server.storage.proxy import Proxy


@pytest.fixture(scope="session", autouse=True)
def _descriptions_read_once() -> Iterator[None]:
    """Each client of the store reads AWS's descriptions of its services, which is most of the time that it takes."""
    if importlib.util.find_spec("botocore") is None:
        yield
        return
    from botocore.loaders import JSONFileLoader

    loader = JSONFileLoader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", functools.cache(JSONFileLoader.load_file))
        patch.setattr(JSONFileLoader, "__new__", lambda kind: loader)
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoProcess]:
    if importlib.util.find_spec("moto") is None:
        said = "needs moto's server: pip install 'moto[server]'"
        if os.environ.get("CI") == "true":
            pytest.fail(said)
        pytest.skip(said)
    made = MotoProcess()
    yield made
    made.stop()


@pytest.fixture
def bucket(moto: MotoProcess, monkeypatch: pytest.MonkeyPatch) -> TestBucket:
    """With this process's environment set so that the server finds it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    return TestBucket(moto)


@pytest.fixture
def proxy(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The server's only way to the store, which it tries twice only, so that tests of failures are quick."""
    monkeypatch.setattr("archipel.server.storage.s3.ATTEMPTS", 2)
    made = Proxy(bucket.moto.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.stop()


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


@pytest.fixture(params=["folder", "object store"])
def place(request: Any, tmp_path: Path) -> Place:
    if request.param == "folder":
        return InFolder(settings_of(tmp_path / "server", "blobs"))
    bucket: TestBucket = request.getfixturevalue("bucket")
    return InBucket(settings_of(tmp_path / "server", bucket.url), bucket)


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


@pytest.fixture
def world(
    data_folder: tuple[Path, str, Keys], bundle_file: Path, empty_database: Path, bucket: TestBucket
) -> Iterator[WorldOnBucket]:
    folder, token, keys = data_folder
    shutil.copy(empty_database, folder / "archipel.db")
    settings = load_settings(folder, environment={}, blobs=bucket.url)
    clock = Clock()
    services = Services.open(settings, clock=clock)
    services.prepare()
    made = WorldOnBucket(
        settings=settings, operator_token=token, keys=keys, clock=clock, services=services, bundle_file=bundle_file,
        app=create_app(settings, clock=clock), coordinator=Coordinator(services), bucket=bucket,
    )  # fmt: skip
    yield made
    services.database.dispose()
    made.app.extensions["archipel"].database.dispose()
    made.coordinator._services.database.dispose()
