"""What goes wrong with object stores: settings, permissions, connections; said in one line with the remedy."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipel.errors import ServerError
from archipel.server.settings import load_settings
from archipel.server.storage import StorageUnreachableError, open_storage
from archipel.server.storage.blobs import BlobStore
from archipel.server.storage.spool import UpdateSpool
from tests.support.moto_process import MotoProcess, TestBucket
from tests.support.places import InBucket, settings_of
from tests.support.store_proxy import Proxy
from tests.support.world import DataFolder

SECRET = "the tests' secret"


def refused(folder: Path, blobs: str) -> str:
    """What `prepare` says."""
    storage = open_storage(settings_of(folder, blobs))
    with pytest.raises(ServerError) as error:
        storage.prepare()
    assert SECRET not in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("blobs", None),
        ("/mnt/shared/blobs", None),
        ("s3:", None),  # a folder of that name
        ("s3://models", ("models", "")),
        ("s3://models/", ("models", "")),
        ("s3://my.models-1/archipel/one_2", ("my.models-1", "archipel/one_2")),
        ("s3://models/a/b/c/", ("models", "a/b/c")),
    ],
)
def test_what_the_setting_may_be(tmp_path: Path, text: str, parts: tuple[str, str] | None) -> None:
    settings = settings_of(tmp_path, text)
    assert settings.bucket == parts
    if parts is None:
        assert settings.blob_folder == tmp_path / text


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3://M",
        "s3://Models/a",
        "s3://models//a",
        "s3://models/../a",
        "s3://models/.a",
        "s3://models/a b",
        "s3://models/a?versionId=1",
        "s3://models/a#b",
        "s3://key:sesame@models/a",
        "s3a://models/a",
        "gs://models/a",
        "https://models.example/a",
        "memory://x",
        "file:///tmp/x",
        "s3://models/a\n",
    ],
)
def test_what_the_setting_may_not_be(data_folder: DataFolder, text: str) -> None:
    folder, _, _ = data_folder
    with pytest.raises(ServerError, match=r"blobs must be a folder or s3://BUCKET/PREFIX") as error:
        load_settings(folder, environment={}, blobs=text)
    # Credentials that somebody put there are not shown.
    assert "sesame" not in str(error.value)


@pytest.mark.sampled(every=4)
def test_without_the_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("s3fs", "aiobotocore", "botocore", "aiohttp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
""")
    code = """
import sys
from pathlib import Path
from archipel.errors import ServerError
from archipel.server.settings import Settings
from archipel.server.services import Services
key = "ab" * 32
def services(blobs):
    return Services.open(Settings(folder=sys.argv[1], enrolment_key=key, publisher_keys=(key,),
                                  operator_token_sha256=key, blobs=blobs))
services("blobs").prepare()
try:
    services("s3://bucket/prefix")
except ServerError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.count("\n") == 1
    assert "is not installed: pip install 'archipel[s3]'" in done.stdout
    assert "setting blobs" in done.stdout


def test_no_such_bucket(bucket: TestBucket, tmp_path: Path) -> None:
    said = refused(tmp_path, f"s3://{bucket.name}-other/prefix")
    assert said == (
        f"setting blobs: s3://{bucket.name}-other/prefix: there is no such bucket; "
        "make it, or correct the setting (NoSuchBucket)"
    )


def test_no_credentials(bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in refused(tmp_path, bucket.url)


def test_aws_settings_that_cannot_be_used(bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("AWS_PROFILE", "missing")
        assert "AWS's environment or files cannot be used (ProfileNotFound)" in refused(tmp_path, bucket.url)
    with monkeypatch.context() as changed:
        changed.setenv("AWS_ENDPOINT_URL", "no address")
        assert "AWS's environment or files cannot be used (ValueError)" in refused(tmp_path, bucket.url)


@pytest.mark.sampled(every=4)
def test_nobody_answers(bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    said = refused(tmp_path, bucket.url)
    assert said.endswith(f"127.0.0.1:{port} does not answer; check AWS_ENDPOINT_URL and the network")


@pytest.fixture(scope="module")
def strict() -> Iterator[MotoProcess]:
    """A store that demands credentials, with one user who may read and list and no more."""
    made = MotoProcess()
    yield made
    made.stop()


@pytest.mark.sampled(every=4)
def test_access_is_refused(strict: MotoProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    for name, value in strict.environment().items():
        monkeypatch.setenv(name, value)
    bucket = TestBucket(strict)
    people = boto3.client("iam", endpoint_url=strict.url, region_name="us-east-1")
    people.create_user(UserName="reader")
    key = people.create_access_key(UserName="reader")["AccessKey"]

    def may(*actions: str) -> None:
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}
        people.put_user_policy(UserName="reader", PolicyName="p", PolicyDocument=json.dumps(policy))

    may("s3:*", "iam:*")
    keys = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
    people = boto3.client("iam", endpoint_url=strict.url, region_name="us-east-1", **keys)
    strict.demand_credentials()
    assert "access key is unknown there; correct AWS_ACCESS_KEY_ID" in refused(tmp_path, bucket.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    assert "secret key is wrong; correct AWS_SECRET_ACCESS_KEY" in refused(tmp_path, bucket.url)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    open_storage(settings_of(tmp_path, bucket.url)).prepare()
    needed = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket", "s3:ListBucketMultipartUploads"]
    for missing in needed:
        may("iam:*", *(action for action in needed if action != missing))
        said = refused(tmp_path, bucket.url)
        assert "access is refused; the credentials in AWS's environment or files need s3:GetObject" in said, missing
        assert key["SecretAccessKey"] not in said
    may("iam:*", *needed)
    storage = open_storage(settings_of(tmp_path, bucket.url))
    storage.prepare()
    # Refused while it works: nothing is lost, so it waits.
    may("iam:*")
    with pytest.raises(StorageUnreachableError, match="access is refused"):
        BlobStore(storage).put(b"hello")
    with pytest.raises(StorageUnreachableError, match="access is refused"):
        UpdateSpool(storage).read("r", "d", "0" * 64)
    with pytest.raises(ServerError, match="the object store cannot be written; the server's log says why"):
        storage.check()


@pytest.mark.sampled(every=3)
def test_a_download_that_breaks_goes_on_where_it_broke(bucket: TestBucket, proxy: Proxy, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(5 << 20)
    digest = hashlib.sha256(data).hexdigest()
    bucket.put(f"sha256/{digest[:2]}/{digest}", data)
    bucket.put(f"updates/r/d.{digest}", data)
    place = InBucket(settings_of(tmp_path, bucket.url), bucket)
    proxy.close()
    proxy.open, proxy.cut_after, proxy.cuts = True, 2_000_000, 0
    assert place.blobs.read(digest) == data
    assert place.spool.read("r", "d", digest) == data
    assert proxy.cuts == 8  # a connection brings one whole MiB
    # It does not go on for ever, and what broke off is not taken for lost.
    proxy.cut_after = 1_000_000
    with pytest.raises(StorageUnreachableError):
        place.spool.read("r", "d", digest)
    place.blobs.put(b"hello")
    assert place.leftovers() == []


@pytest.mark.sampled(every=3)
def test_a_store_that_cannot_go_on_where_it_broke(bucket: TestBucket, proxy: Proxy, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(5 << 20)
    digest = hashlib.sha256(data).hexdigest()
    bucket.put(f"updates/r/d.{digest}", data)
    place = InBucket(settings_of(tmp_path, bucket.url), bucket)
    proxy.close()
    proxy.open, proxy.cut_after, proxy.replaced = True, 2_000_000, (b"Range:", b"Other:")
    with pytest.raises(StorageUnreachableError, match="cannot go on from byte 1048576"):
        place.spool.read("r", "d", digest)
    assert proxy.replacements > 0


@pytest.mark.sampled(every=4)
def test_an_upload_that_breaks_is_not_there(bucket: TestBucket, proxy: Proxy, tmp_path: Path) -> None:
    place = InBucket(settings_of(tmp_path, bucket.url), bucket)
    for size in (1000, (16 << 20) + 1):
        proxy.close()
        with pytest.raises(StorageUnreachableError, match="does not answer"):
            place.blobs.put(bytes(size))
        proxy.open = True
        assert (place.files(), place.leftovers()) == ({}, [])
        place.blobs.put(bytes(size))
        assert len(place.files()) == 1
        place.delete(next(iter(place.files())))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("size", [1000, (16 << 20) + 1])
def test_only_bytes_with_the_digest_are_stored(bucket: TestBucket, proxy: Proxy, tmp_path: Path, size: int) -> None:
    place = InBucket(settings_of(tmp_path, bucket.url), bucket)
    written = place.blobs.receive([bytes(size)])
    with open(written.temporary, "r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    with pytest.raises(OSError, match="damaged before it was stored"):
        place.blobs.keep(written)
    assert (place.files(), place.leftovers()) == ({}, [])
    if size <= 16 << 20:
        place.blobs.put(bytes(size))
        # The store was given the digest to compare with.
        expected = base64.b64encode(hashlib.sha256(bytes(size)).digest())
        assert b"x-amz-checksum-sha256: " + expected.lower() in proxy.sent.lower()


@pytest.mark.sampled(every=3)
def test_the_health_of_a_server_whose_store_is_away(
    bucket: TestBucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archipel.server.storage.object_store.PROBE_SECONDS", 0.2)
    place = InBucket(settings_of(tmp_path, bucket.url), bucket)
    place.blobs.check()
    proxy.close()
    seen = []
    for _ in range(50):
        try:
            place.blobs.check()
            seen.append("ok")
        except ServerError as error:
            seen.append(str(error))
            break
        threading.Event().wait(0.05)
    assert seen[-1] == "the object store cannot be written; the server's log says why"
    proxy.open = True
    threading.Event().wait(0.3)
    place.blobs.check()


@pytest.mark.sampled(every=3)
def test_anybody_may_ask_for_the_health_and_the_store_is_asked_once(
    bucket: TestBucket, proxy: Proxy, tmp_path: Path
) -> None:
    place = InBucket(settings_of(tmp_path, bucket.url), bucket)
    place.blobs.check()
    before = bucket.client.head_object(Bucket=bucket.name, Key=f"{bucket.prefix}/probe")["LastModified"]
    threading.Event().wait(1.1)  # its clock shows whole seconds
    for _ in range(100):
        place.blobs.check()
    assert bucket.client.head_object(Bucket=bucket.name, Key=f"{bucket.prefix}/probe")["LastModified"] == before


@pytest.mark.sampled(every=3)
def test_a_whole_bucket_at_an_endpoint_with_a_name(
    bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{bucket.moto.port}")
    storage = open_storage(settings_of(tmp_path, f"s3://{bucket.name}"))
    storage.prepare()
    digest = BlobStore(storage).put(b"hello")
    spool = UpdateSpool(storage)
    spool.keep("r", "d", spool.receive("r", [b"hello"]))
    listed = bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]
    assert [each["Key"] for each in listed] == ["probe", f"sha256/2c/{digest}", f"updates/r/d.{digest}"]
    assert sorted(storage.keys("")) == [f"sha256/2c/{digest}", f"updates/r/d.{digest}"]
    spool.sweep(list)
    assert list(storage.keys("")) == [f"sha256/2c/{digest}"]


@pytest.mark.sampled(every=3)
def test_others_in_the_bucket_are_left_alone(bucket: TestBucket, tmp_path: Path) -> None:
    """Two servers' prefixes, one the beginning of the other, and what is not a server's at all."""
    first = InBucket(settings_of(tmp_path / "first", bucket.url), bucket)
    second = InBucket(settings_of(tmp_path / "second", f"{bucket.url}-2"), bucket)
    for place in (first, second):
        place.spool.open_round("r")
        place.spool.keep("r", "d", place.spool.receive("r", [b"update"]))
        place.blobs.put(b"hello")
    bucket.client.put_object(Bucket=bucket.name, Key=f"{bucket.prefix}-other/updates/r/x", Body=b"x")
    foreign = bucket.client.create_multipart_upload(Bucket=bucket.name, Key="elsewhere/large")["UploadId"]
    own = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=f"{bucket.prefix}/sha256/ab/x")["UploadId"]
    first.spool.sweep(list)
    first.storage.sweep(before=1.2e9)  # in 2008; to this store, everything in parts was begun in 2010
    uploads = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert {each["UploadId"] for each in uploads} == {foreign, own}
    first.storage.sweep(before=1.3e9)
    uploads = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert [each["UploadId"] for each in uploads] == [foreign]
    assert sorted(second.storage.keys("")) == [
        f"sha256/2c/{hashlib.sha256(b'hello').hexdigest()}",
        f"updates/r/d.{hashlib.sha256(b'update').hexdigest()}",
    ]
    assert list(first.storage.keys("updates")) == []
    assert bucket.client.get_object(Bucket=bucket.name, Key=f"{bucket.prefix}-other/updates/r/x")["Body"].read() == b"x"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(bucket: TestBucket, tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.places import settings_of
from archipel.server.storage.blobs import BlobStore
from archipel.server.storage import open_storage
storage = open_storage(settings_of(Path(sys.argv[2]), sys.argv[3]))
storage.prepare()
store = BlobStore(storage)
store.put(bytes(17 << 20))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
digest = store.keep(store.receive(bytes(1 << 20) for _ in range(400)))
for path in (Path(sys.argv[2]) / "blob-cache" / "sha256").iterdir():
    path.unlink()
with store.open(digest) as path:
    assert path.stat().st_size == 400 << 20
print(peak() - before)
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parents[4]), str(tmp_path), bucket.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40 << 20
