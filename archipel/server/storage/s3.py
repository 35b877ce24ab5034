"""Reads and writes whole objects below one prefix of one S3 bucket, in pieces, and explains errors in plain words.

Endpoint, region and credentials are those that AWS's own tools would use: environment, configuration files, roles.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from botocore import exceptions as botocore
from fsspec.asyn import sync
from s3fs import S3FileSystem

from archipel.errors import ServerError
from archipel.server.storage.interface import MAX_FILE_BYTES, StorageUnreachableError

PART_BYTES = 8 << 20
"""Every part but the last: S3 needs 5 MiB at least, and 10,000 parts of this size are 80 GB."""
ONE_PUT_BYTES = 2 * PART_BYTES
"""Larger files are uploaded in parts."""
READ_BYTES = 1 << 20
DELETE_KEYS = 1000
"""The most keys that S3 deletes in one request."""
ATTEMPTS = 4
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0

_NEEDS = (
    "s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket, s3:ListBucketMultipartUploads, s3:AbortMultipartUpload"
)
_REFUSED = f"access is refused; the credentials in AWS's environment or files need {_NEEDS}"
_REASONS = {
    "AccessDenied": _REFUSED,
    "403": _REFUSED,
    "AllAccessDisabled": _REFUSED,
    "AuthorizationHeaderMalformed": "the region is wrong; set AWS_REGION",
    "ExpiredToken": "the credentials have expired; renew them in AWS's environment or files",
    "InvalidAccessKeyId": "the access key is unknown there; correct AWS_ACCESS_KEY_ID or AWS_ENDPOINT_URL",
    "NoSuchBucket": "there is no such bucket; make it, or correct the setting",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "SignatureDoesNotMatch": "the secret key is wrong; correct AWS_SECRET_ACCESS_KEY",
}
_AWAY = (botocore.HTTPClientError, botocore.ConnectionError, aiohttp.ClientError, TimeoutError, ConnectionError)
_MISSING = {"get_object": ("NoSuchKey", "404"), "abort_multipart_upload": ("NoSuchUpload", "404")}


class Bucket:
    """One prefix of a bucket.

    Every method raises StorageUnreachableError, with a remedy, if the store does not answer as it should, and
    FileNotFoundError for a key that does not exist.
    """

    def __init__(self, name: str, prefix: str, *, connections: int = 20) -> None:
        self._name = name
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{name}/{prefix}".rstrip("/")
        self._files = S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": ANSWER_SECONDS,
                "max_pool_connections": connections,
                "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
            },
        )
        self._files.retries = 1  # botocore retries by itself; s3fs would multiply its attempts

    def put(self, key: str, file: Path, *, size: int, digest: str) -> None:
        """Store `file` as one object, durably when this returns; readers never see a part of it.

        It needs memory for two parts. Raises OSError if the file does not have this SHA-256 (hex).
        """
        with open(file, "rb") as source:
            if size > ONE_PUT_BYTES:
                self._put_parts(key, source, digest)
                return
            data = source.read(size + 1)  # one byte more, so that a file that has grown fails the comparison
        self.put_bytes(key, data, digest)

    def put_bytes(self, key: str, data: bytes, digest: str) -> None:
        """Store `data` with its digest. A store that supports checksums compares what it received with it."""
        _compare(hashlib.sha256(data), digest)
        checksum = base64.b64encode(bytes.fromhex(digest)).decode()
        self._call("put_object", key, Body=data, ChecksumSHA256=checksum)

    def _put_parts(self, key: str, source: Any, digest: str) -> None:
        upload = self._field(self._call("create_multipart_upload", key), "UploadId")
        try:
            parts: list[dict[str, Any]] = []
            running = hashlib.sha256()
            while part := source.read(PART_BYTES):
                running.update(part)
                number = len(parts) + 1
                answer = self._call("upload_part", key, UploadId=upload, PartNumber=number, Body=part)
                parts.append({"PartNumber": number, "ETag": self._field(answer, "ETag")})
            # Before completing: until then the object does not exist, or still has its old bytes.
            _compare(running, digest)
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            # A failure is not reported: it would hide the first error, and `abort_uploads` removes the parts later.
            with suppress(OSError):
                self._call("abort_multipart_upload", key, UploadId=upload)
            raise

    def stream(self, key: str) -> Iterator[bytes]:
        """The object in pieces of at most 1 MiB. After a broken connection a new one continues where it broke.

        Raises ServerError for an object larger than MAX_FILE_BYTES, which the server never stores.
        """
        # `broken` counts failures in a row: any piece that arrives sets it back, so a long object may need many
        # connections, but a store that sends nothing is given up after ATTEMPTS.
        position, size, broken = 0, -1, 0
        while position != size:
            resume = {"Range": f"bytes={position}-"} if position else {}
            answer = self._call("get_object", key, **resume)
            body = self._field(answer, "Body")
            try:
                size = position + max(0, int(self._field(answer, "ContentLength")))
                if size > MAX_FILE_BYTES:
                    raise ServerError(f"{self.url}/{key}: {size} bytes, the limit is {MAX_FILE_BYTES}")
                # A store that ignores the range would send the object from its beginning again.
                if position and not str(answer.get("ContentRange", "")).startswith(f"bytes {position}-"):
                    raise StorageUnreachableError(f"{self.url}/{key}: the store cannot go on from byte {position}")
                while position < size:
                    piece = self._read(key, body, min(READ_BYTES, size - position))
                    position += len(piece)
                    broken = 0
                    yield piece
            except _BrokenOffError as error:
                broken += 1
                if broken == ATTEMPTS:
                    raise StorageUnreachableError(str(error)) from None
            finally:
                sync(self._files.loop, _close, body)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects. Missing ones are no error."""
        remaining = iter(keys)
        while batch := list(islice(remaining, DELETE_KEYS)):
            if len(batch) == 1:
                self._call("delete_object", batch[0])
                continue
            objects = [{"Key": self._prefix + key} for key in batch]
            answer = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            failed = answer.get("Errors", [])  # the request succeeds even if single keys could not be deleted
            if failed:
                raise self._refusal(str(failed[0].get("Code", "")))

    def keys(self, folder: str) -> Iterator[str]:
        """The keys of all objects below `folder` ("": of all), without the bucket's prefix."""
        for page in self._pages("list_objects_v2", f"{folder}/" if folder else ""):
            for entry in page.get("Contents", ()):
                yield str(self._field(entry, "Key")).removeprefix(self._prefix)

    def folders(self, folder: str) -> list[str]:
        """The names that follow `folder/` in keys, up to the next slash."""
        pages = self._pages("list_objects_v2", f"{folder}/", Delimiter="/")
        prefixes = [str(self._field(each, "Prefix")) for page in pages for each in page.get("CommonPrefixes", ())]
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes]

    def abort_uploads(self, folder: str, before: float) -> None:
        """Abort multipart uploads below `folder` that were begun before `before` (Unix seconds) and never completed.

        The store keeps, and charges for, their parts until then.
        """
        for page in self._pages("list_multipart_uploads", f"{folder}/"):
            for upload in page.get("Uploads", ()):
                if self._field(upload, "Initiated").timestamp() < before:
                    key = str(self._field(upload, "Key")).removeprefix(self._prefix)
                    with suppress(FileNotFoundError):  # completed or aborted since it was listed
                        self._call("abort_multipart_upload", key, UploadId=self._field(upload, "UploadId"))

    def _pages(self, method: str, folder: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self._call(method, Prefix=self._prefix + folder, **arguments, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            # Objects are paged by a token, multipart uploads by two markers.
            if "NextContinuationToken" in page:
                more = {"ContinuationToken": page["NextContinuationToken"]}
            else:
                names = ("KeyMarker", "UploadIdMarker")
                more = {name: self._field(page, f"Next{name}") for name in names}

    def _call(self, method: str, key: str | None = None, **arguments: Any) -> dict[str, Any]:
        if key is not None:
            arguments["Key"] = self._prefix + key
        try:
            answer: dict[str, Any] = self._files.call_s3(method, Bucket=self._name, **arguments)
        except Exception as error:  # noqa: BLE001 - what the client makes of junk can be anything
            response = getattr(error.__cause__, "response", None)
            if not isinstance(response, dict):
                raise StorageUnreachableError(self._explain(error)) from None
            code = str(response.get("Error", {}).get("Code", ""))
            if code in _MISSING.get(method, ()):
                raise FileNotFoundError(errno.ENOENT, "not there", f"{self.url}/{key}") from None
            raise self._refusal(code) from None
        return answer

    def _field(self, answer: dict[str, Any], name: str) -> Any:
        if name not in answer:
            raise StorageUnreachableError(f"setting blobs: {self.url}: {self._host()} does not speak S3: no {name}")
        return answer[name]

    def _read(self, key: str, body: Any, count: int) -> bytes:
        try:
            piece: bytes = sync(self._files.loop, _read, body, count)
        except Exception as error:  # noqa: BLE001
            raise _BrokenOffError(self._explain(error)) from None
        if len(piece) < count:
            raise _BrokenOffError(f"{self.url}/{key}: the store sends less than it announced")
        return piece

    def _refusal(self, code: str) -> StorageUnreachableError:
        # Only the code is shown, and only if it is one word: the store's own text could say anything, and goes to logs.
        word = code if re.fullmatch("[A-Za-z0-9.]{1,64}", code) else "no code"
        return StorageUnreachableError(f"setting blobs: {self.url}: {_REASONS.get(word, 'the store refuses')} ({word})")

    def _explain(self, error: Exception) -> str:
        if isinstance(error, botocore.NoCredentialsError | botocore.PartialCredentialsError):
            why = "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role or file of AWS's"
        elif isinstance(error, _AWAY):
            why = f"{self._host()} does not answer; check AWS_ENDPOINT_URL and the network"
        elif not isinstance(error, botocore.BotoCoreError | ValueError):
            why = f"{self._host()} does not speak S3 ({type(error).__name__}); check AWS_ENDPOINT_URL"
        else:
            # An error in the machine's own AWS settings, such as an unknown profile or an endpoint that is no URL.
            why = f"AWS's environment or files cannot be used ({type(error).__name__})"
        return f"setting blobs: {self.url}: {why}"

    def _host(self) -> str:
        endpoint: str = self._files.s3.meta.endpoint_url
        # Without a user and password before the @, which must not go to logs.
        return urlsplit(endpoint).netloc.rpartition("@")[2]


class _BrokenOffError(Exception):
    """The connection broke in the middle of an object, so that reading can be continued."""


def _compare(actual: Any, digest: str) -> None:
    if actual.hexdigest() != digest:
        raise OSError(errno.EIO, "the temporary file was damaged before it was stored")


async def _read(body: Any, count: int) -> bytes:
    # Collects `count` bytes in one call, because each call from the server's thread to the client's thread and back
    # takes longer than reading a small piece.
    pieces = []
    while count > 0 and (piece := await body.read(count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


async def _close(body: Any) -> None:
    body.close()
