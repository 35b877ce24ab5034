"""Whatever an object store answers, only the two kinds of error come out that callers expect, and nothing false."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from archipel.errors import ServerError
from archipel.server.storage import StorageUnreachableError
from archipel.server.storage.s3 import Bucket
from tests.server.storage.trouble.test_unusable import refused
from tests.support.moto_process import TestBucket

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
LIST = b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%s</ListBucketResult>'
UPLOADS = b'<ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%s</ListMultipartUploadsResult>'
ERROR = b"<Error><Code>%s</Code><Message>m</Message></Error>"


class Answering:
    """A server that reads one request of each connection and says `answer`."""

    def __init__(self) -> None:
        self.answer = b""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += connection.recv(65536) or b"\r\n\r\n"
                    head, _, rest = head.lower().partition(b"\r\n\r\n")
                    if b"100-continue" in head:
                        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    announced = re.search(rb"content-length: (\d+)", head)
                    left = int(announced[1]) - len(rest) if announced else 0
                    while left > 0:
                        left -= len(connection.recv(1 << 20)) or left
                    connection.sendall(self.answer)
                except OSError:
                    continue


def http(body: bytes, status: int = 200, *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


@pytest.fixture
def answering(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    for name, value in (("ATTEMPTS", 1), ("PART_BYTES", 50), ("ONE_PUT_BYTES", 50)):
        monkeypatch.setattr(f"archipel.server.storage.s3.{name}", value)
    made = Answering()
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.stop()


def calls(folder: Path) -> list[Callable[[Bucket], object]]:
    """Everything that is asked of a store; what they give is looked at below."""
    (folder / "small").write_bytes(b"hello")
    (folder / "parts").write_bytes(bytes(120))
    parts = hashlib.sha256(bytes(120)).hexdigest()
    return [
        lambda bucket: bucket.put("a", folder / "small", size=5, digest=HELLO),
        lambda bucket: bucket.put("a", folder / "parts", size=120, digest=parts),
        lambda bucket: b"".join(bucket.stream("a")),
        lambda bucket: list(bucket.keys("a")),
        lambda bucket: bucket.folders("a"),
        lambda bucket: bucket.delete(["a"]),
        lambda bucket: bucket.delete(["a", "b"]),
        lambda bucket: bucket.abort_uploads("a", 4e9),
    ]


def error_of(call: Callable[[Bucket], object], bucket: Bucket) -> Exception | None:
    try:
        call(bucket)
    except (StorageUnreachableError, FileNotFoundError, ServerError) as error:
        return error
    return None


ANSWERS = [
    b"",
    b"\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.9\r\n",
    b"HTTP/1.1 200 OK\r\n\r\nno length at all",
    http(b"<html><body>welcome</body></html>"),
    http(b""),
    http(b"", 204),
    http(b"", 301),
    http(b"", 302, "Location: /elsewhere"),
    http(b"", 403),
    http(b"", 404),
    http(b"", 500),
    http(ERROR % b"Two\nlines of <b>text</b>", 400),
    http(ERROR % (b"x" * 10_000), 400),
    http(ERROR % b"NoSuchBucket", 404),
    http(b"half", length=1000),
    http(b"x", length=-5),
    http(b"x", 200, "Content-Length: 7"),
    http(b"x", length=5 << 30),
    http(LIST % b"<IsTruncated>true</IsTruncated>"),
    http(LIST % b"<Contents><Size>1</Size></Contents><CommonPrefixes></CommonPrefixes>"),
    http(LIST % b"<IsTruncated>maybe</IsTruncated>"),
    http(UPLOADS % b"<Upload><Key>a</Key></Upload>"),
    http(UPLOADS % b"<Upload><Initiated>never</Initiated></Upload>"),
    http(UPLOADS % b"<IsTruncated>true</IsTruncated>"),
    http(b"<" * 100_000),
]


@pytest.mark.parametrize(
    "answer",
    [*ANSWERS[::3], *(pytest.param(each, marks=pytest.mark.slow) for each in ANSWERS if each not in ANSWERS[::3])],
)
@pytest.mark.sampled(every=6)
def test_junk(answering: Answering, tmp_path: Path, answer: bytes) -> None:
    answering.answer = answer
    bucket = Bucket("bucket", "prefix")
    for call in calls(tmp_path):
        error = error_of(call, bucket)
        assert error is None or "\n" not in str(error)
        assert len(str(error)) < 500
    assert refused(tmp_path / "server", "s3://bucket/prefix")


def test_an_object_that_is_too_large_is_not_read(answering: Answering, tmp_path: Path) -> None:
    answering.answer = http(b"x" * 1000, length=(4 << 30) + 1)
    with pytest.raises(ServerError, match="4294967297 bytes, the limit is 4294967296"):
        list(Bucket("bucket", "prefix").stream("a"))


def test_a_page_of_somebody_else(answering: Answering, tmp_path: Path) -> None:
    answering.answer = http(b"<html>welcome</html>")
    said = refused(tmp_path, "s3://bucket/prefix")
    assert said == "setting blobs: s3://bucket/prefix: the store gives back other bytes than it was given" or (
        "does not speak S3" in said
    )


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=300), status=st.sampled_from([200, 204, 206, 400, 403, 404, 409, 500, 503]))
@example(body=LIST % b"<Contents><Key>\xff</Key></Contents>", status=200)
def test_fuzz(answering: Answering, tmp_path: Path, body: bytes, status: int) -> None:
    answering.answer = http(body, status)
    bucket = Bucket("bucket", "prefix")
    for call in calls(tmp_path):
        assert "\n" not in str(error_of(call, bucket))
