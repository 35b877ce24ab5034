"""Requests to a server that is not trusted: limits before reading, strict decoding, bounded retries.

A request is sent again if the connection fails, if the answer is cut short or cannot be decoded, and after 429, 500,
502, 503 and 504. All requests of the agent may be sent twice, because the server answers the same bytes in the same
way.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar

import urllib3

from archipel.client.config import AgentConfig
from archipel.errors import ClientError, MessageError, RefusedError, TooLargeError, UnreachableError
from archipel.protocol.address import check_url
from archipel.protocol.backoff import Backoff
from archipel.protocol.messages import Problem
from archipel.protocol.problems import KINDS, TRY_AGAIN
from archipel.protocol.sealed import decode
from archipel.protocol.secagg_plus.messages import Packed, unpack
from archipel.protocol.tls import client_context
from archipel.tracing import device_ids, write_parent

MAX_MESSAGE_BYTES = 16 << 20
_MAX_PROBLEM_BYTES = 64 << 10
_PROGRESS = 64 << 10
"""Bytes of a download, at least, after which it may fail as often again."""
_CHUNK = 64 << 10
_CONTENT_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16})", re.ASCII)
_ROUND = re.compile("/v1/rounds/([0-9a-f]{32})(?:/|$)")

T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes and requests since the last `take`. Bodies are exact; request lines and headers count as HTTP/1.1 text."""

    sent: int = 0
    received: int = 0
    headers_sent: int = 0
    headers_received: int = 0
    requests: int = 0

    def take(self) -> Traffic:
        """Return the counts, and start counting again."""
        taken = replace(self)
        for name in vars(taken):
            setattr(self, name, 0)
        return taken


class Transport:
    """The connection to one server. `pause(seconds)` waits between attempts, and may raise to give up.

    The constructor raises TlsError if a file for TLS cannot be used, ClientError if the URL is not allowed.
    """

    def __init__(self, server: str, config: AgentConfig, pause: Callable[[float], None] = time.sleep) -> None:
        check_url(server, allow_http=config.allow_http)
        self._server = server.rstrip("/")
        self._config = config
        self._pause = pause
        self._random = random.Random()
        self._backoff = Backoff(config.backoff, longest=config.max_wait, jitter=config.poll_jitter)
        tls = None
        if server.startswith("https://"):
            tls = client_context(config.ca_file, config.client_certificate, config.client_key)
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=1, ssl_context=tls)
        self._clock: tuple[float, float] | None = None
        self.attempts = config.attempts
        self.traffic = Traffic()

    def server_time(self) -> float | None:
        """Unix seconds by the server's clock, from the last Date header of an answer; None before there is one."""
        return None if self._clock is None else self._clock[0] + time.monotonic() - self._clock[1]

    def silence(self) -> float:
        """For how many seconds the server has not answered; 0 before its first answer."""
        return 0.0 if self._clock is None else time.monotonic() - self._clock[1]

    def wait(self, attempt: int, retry_after: float | None = None) -> None:
        """Wait before attempt `attempt` + 1: as long as the server asked for, else longer each time."""
        self._pause(self._backoff.after(attempt, retry_after=retry_after, draw=self._random.random()))

    def jittered(self, seconds: float) -> float:
        """`seconds`, longer or shorter by up to the configured share."""
        return self._backoff.jittered(seconds, self._random.random())

    def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        retry: bool = True,
        limit: int = MAX_MESSAGE_BYTES,
    ) -> T:
        """Send a request, and decode the answer strictly as a `kind`: MessagePack where that is Packed, else JSON.

        No more than `limit` bytes of the answer are read. Raises RefusedError for an error status, UnreachableError if
        no attempt brought an answer.
        """

        def read(response: urllib3.BaseHTTPResponse) -> T:
            if response.status not in (200, 201):
                raise _unexpected_status(response.status)
            return _decode(f"{method} {path}", self._read(response, limit), kind)

        return self._send(method, path, read, body, headers or {}, retry)

    def download(
        self,
        path: str,
        target: Path,
        limit: int,
        headers: Mapping[str, str] | None = None,
        *,
        stop: int | None = None,
    ) -> None:
        """Fetch `path` into the file `target`, and continue the part that the file has already.

        With `stop` it fetches the bytes before that offset only. The caller verifies the bytes. Raises TooLargeError if
        there are more than `limit`, RefusedError, UnreachableError, or OSError if the file cannot be written.
        """

        def read(response: urllib3.BaseHTTPResponse) -> None:
            if response.status == 416:
                if target.exists() and response.headers.get("Content-Range") == f"bytes */{target.stat().st_size}":
                    # The range begins at the end of the file: it was complete.
                    self._read(response, _MAX_PROBLEM_BYTES)
                    return
                # The part is longer than the server's file, so it is of another file: start again.
                target.unlink(missing_ok=True)
                raise _TryAgainError("the server cannot continue the download", None)
            if response.status not in (200, 206):
                raise _unexpected_status(response.status)
            # An answer of 200 to a request for a range is the whole file, which overwrites the part.
            there = target.stat().st_size if response.status == 206 and target.exists() else 0
            end = None
            if response.status == 206:
                end = _part_end(response.headers.get("Content-Range", ""), there, stop)
                if end is None:
                    target.unlink(missing_ok=True)
                    raise _TryAgainError("the server sent another part than the one asked for", None)
            with open(target, "ab" if there else "wb") as file:
                for chunk in self._chunks(response, limit - there):
                    file.write(chunk)
                size = file.tell()
            if end is not None and size != end:
                # Too short: the next attempt continues behind it. Too long: the whole answer is wrong.
                if size > end:
                    target.unlink()
                raise _TryAgainError(f"the answer has {size - there} bytes, not the {end - there} that it says", None)

        def held() -> int:
            return target.stat().st_size if target.exists() else 0

        # A function, because each attempt continues the file where the one before has left it.
        def with_range() -> Mapping[str, str]:
            size = held()
            last = "" if stop is None else stop - 1
            return {**(headers or {}), **({"Range": f"bytes={size}-{last}"} if size or stop is not None else {})}

        self._send("GET", path, read, None, with_range, True, held)

    def close(self) -> None:
        self._pool.clear()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        path: str,
        read: Callable[[urllib3.BaseHTTPResponse], T],
        body: bytes | None,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]],
        retry: bool,
        held: Callable[[], int] | None = None,
    ) -> T:
        """`held`: how many bytes of a download there are. Attempts that fail in between are counted from there on."""
        attempts = self.attempts if retry else 1
        attempt, before = 0, 0 if held is None else held()
        while True:
            attempt += 1
            try:
                return self._send_once(method, path, read, body, headers() if callable(headers) else headers)
            except (_TryAgainError, MessageError) as error:
                asked = error.retry_after if isinstance(error, _TryAgainError) else None
                refused = error.refused if isinstance(error, _TryAgainError) else None
                if held is not None and (now := held()) >= before + _PROGRESS:
                    attempt, before = 1, now
                # The owner does not allow longer waits than `max_wait` here; the caller decides when to try again.
                if attempt == attempts or (asked is not None and asked > self._config.max_wait):
                    raise refused or UnreachableError(
                        f"{self._server}: {method} {path} failed {attempt} times, last: {error}"
                    ) from None
                self.wait(attempt, asked)

    def _send_once(
        self,
        method: str,
        path: str,
        read: Callable[[urllib3.BaseHTTPResponse], T],
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> T:
        all_headers = {"Accept-Encoding": "identity", "User-Agent": "archipel", **headers}
        match = _ROUND.match(path) if self._config.otlp_address else None
        if match is not None:
            all_headers["traceparent"] = write_parent(device_ids(match[1]))
        if body is not None:
            all_headers.setdefault("Content-Type", "application/json")
            all_headers["Content-Length"] = str(len(body))
        with self._network_errors():
            response = self._pool.request(
                method,
                self._server + path,
                body=body,
                headers=all_headers,
                timeout=urllib3.Timeout(connect=self._config.connect_timeout, read=self._config.read_timeout),
                # `_send` repeats requests, and a redirect could lead to another server.
                retries=False,
                redirect=False,
                # The stated size may be wrong, so `_chunks` reads pieces up to a limit. No decompression: a few bytes
                # could become gigabytes.
                preload_content=False,
                decode_content=False,
            )
        self._count(method, path, all_headers, body, response)
        finished = False
        try:
            # 416 is an answer for `download`, and no error.
            if response.status >= 400 and response.status != 416:
                raise self._problem(response)
            result = read(response)
            finished = True
            return result
        finally:
            # Unread bytes would be taken for the next answer, so such a connection is not used again.
            if finished:
                response.release_conn()
            else:
                response.close()

    def _problem(self, response: urllib3.BaseHTTPResponse) -> Exception:
        status = response.status
        retry_after = _retry_after(response.headers.get("Retry-After"))
        message = "the server gave no reason"
        # Where it is no Problem but, for example, the page of a proxy, the status has to do.
        with suppress(MessageError, _TryAgainError):
            message = decode("problem", self._read(response, _MAX_PROBLEM_BYTES), Problem).detail
        refused = RefusedError(status, KINDS.get(status, "error"), message, retry_after)
        return _TryAgainError(str(refused), retry_after, refused) if status in TRY_AGAIN else refused

    def _read(self, response: urllib3.BaseHTTPResponse, limit: int) -> bytes:
        try:
            return b"".join(self._chunks(response, limit))
        except ClientError as error:
            # No message is this large, so the answer is not the server's but, for example, a proxy's.
            raise _TryAgainError(str(error), None) from None

    def _chunks(self, response: urllib3.BaseHTTPResponse, limit: int) -> Iterator[bytes]:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _TryAgainError("the answer is compressed, which was not asked for", None)
        declared = response.headers.get("Content-Length", "")
        if declared.isdigit() and int(declared) > limit:
            raise TooLargeError(f"{self._server}: the answer has {declared} bytes, the limit here is {limit}")
        # The read timeout bounds each silence only: a server could send one byte now and then for ever.
        deadline = time.monotonic() + self._config.request_timeout
        total = 0
        while True:
            with self._network_errors():
                chunk = response.read1(_CHUNK)
            if not chunk:
                break
            total += len(chunk)
            self.traffic.received += len(chunk)
            if total > limit:
                raise TooLargeError(f"{self._server}: the answer has more than {limit} bytes, the limit here")
            if time.monotonic() > deadline:
                raise _TryAgainError(f"the answer took longer than {self._config.request_timeout:g} s", None)
            yield chunk
        # A connection that is cut off looks like the end of the body.
        if declared.isdigit() and total < int(declared):
            raise _TryAgainError(f"the answer ended after {total} of {declared} bytes", None)

    @contextmanager
    def _network_errors(self) -> Iterator[None]:
        try:
            yield
        except urllib3.exceptions.HTTPError as error:
            raise _TryAgainError(_innermost_text(error), None) from None
        except OSError as error:
            raise _TryAgainError(error.strerror or str(error), None) from None

    def _count(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        response: urllib3.BaseHTTPResponse,
    ) -> None:
        date = _date(response.headers.get("Date"))
        if date is not None:
            self._clock = (date, time.monotonic())
        traffic = self.traffic
        traffic.requests += 1
        traffic.sent += len(body or b"")
        traffic.headers_sent += len(f"{method} {path} HTTP/1.1\r\n\r\n") + _header_bytes(headers)
        traffic.headers_received += len("HTTP/1.1 200 OK\r\n\r\n") + _header_bytes(response.headers)


def _decode(label: str, data: bytes, kind: type[T]) -> T:
    return unpack(data, kind) if issubclass(kind, Packed) else decode(label, data, kind)


class _TryAgainError(Exception):
    """A failure after which another attempt may succeed. `refused` is the server's own error, if it answered at all."""

    def __init__(self, message: str, retry_after: float | None, refused: RefusedError | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.refused = refused


def _unexpected_status(status: int) -> RefusedError:
    return RefusedError(status, "error", "the server answered with a status that this request does not have")


def _part_end(content_range: str, start: int, stop: int | None) -> int | None:
    """The offset at which the part ends; None unless it is the part from `start` to `stop`, or to the file's end."""
    match = _CONTENT_RANGE.fullmatch(content_range)
    if match is None:
        return None
    first, last, size = map(int, match.groups())
    return last + 1 if (first, last + 1) == (start, size if stop is None else stop) and last < size else None


def _header_bytes(headers: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers.items())


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header: a number, or a date."""
    try:
        seconds = float(value or "")
    except ValueError:
        date = _date(value)
        seconds = math.nan if date is None else date - time.time()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _date(value: str | None) -> float | None:
    try:
        return parsedate_to_datetime(value or "").timestamp()
    except (ValueError, OverflowError, IndexError, TypeError):
        return None


def _innermost_text(error: Exception) -> str:
    # urllib3 wraps errors, and the innermost one says what happened.
    reason = getattr(error, "reason", None)
    return str(reason if isinstance(reason, Exception) else error)
