"""The two kinds of storage, each with a look from outside at what is in it."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipel.server.app import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import load_settings
from tests.support.fixtures.bucket import bucket as bucket
from tests.support.fixtures.bucket import moto as moto
from tests.support.moto_process import TestBucket
from tests.support.places import InBucket, InFolder, Place, WorldOnBucket, settings_of
from tests.support.store_proxy import Proxy
from tests.support.world import Clock, DataFolder


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


@pytest.fixture
def proxy(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The server's only way to the store, which it tries twice only, so that tests of failures are quick."""
    monkeypatch.setattr("archipel.server.storage.s3.ATTEMPTS", 2)
    made = Proxy(bucket.moto.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.stop()


@pytest.fixture(params=["folder", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return InFolder(settings_of(tmp_path / "server", "blobs"))
    bucket: TestBucket = request.getfixturevalue("bucket")
    return InBucket(settings_of(tmp_path / "server", bucket.url), bucket)


@pytest.fixture
def world(
    data_folder: DataFolder, bundle_file: Path, empty_database: Path, bucket: TestBucket
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
