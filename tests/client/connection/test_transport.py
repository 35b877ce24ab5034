"""The transport against a server that fails in every way; each request of the script gets the next raw answer."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel.client import AgentConfig
from archipel.client.connection.transport import Transport
from archipel.errors import ClientError, RefusedError, UnreachableError
from archipel.protocol.messages import Receipt
from tests.support.in_thread import in_thread

Answer = bytes | Callable[[BaseHTTPRequestHandler], None]

STORED = b'{"stored":true}'


def ok(body: bytes = STORED, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def problem(status: str, kind: str, **headers: str) -> bytes:
    body = b'{"type":"urn:archipel:problem:%s","title":"a","status":%s,"detail":"no","request_id":"1"}'
    return ok(body % (kind.encode(), status[:3].encode()), status, **headers)


class Script(ThreadingHTTPServer):
    """Answers in order; the last one again and again."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Answer] = []
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Script

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.server.seen.append((self.command, self.path, dict(self.headers), body))
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if callable(answer):
            answer(self)
        else:
            self.wfile.write(answer)
        self.close_connection = True

    do_GET = do_PUT = do_POST = _answer

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def script() -> Iterator[Script]:
    with in_thread(Script()) as server:
        yield server


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def make(script: Script, tmp_path: Path, pauses: list[float]) -> Iterator[Callable[..., Transport]]:
    made: list[Transport] = []

    def transport(**changes: Any) -> Transport:
        values: dict[str, Any] = {"attempts": 3, "read_timeout": 0.3, "connect_timeout": 0.3, "poll_jitter": 0.0}
        url = changes.pop("url", script.url)
        made.append(Transport(url, AgentConfig(folder=tmp_path, **{**values, **changes}), pauses.append))
        return made[-1]

    yield transport
    for each in made:
        each.close()


def close_before_answering(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def hang(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(0.8)


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n")
    for byte in STORED:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.1)


BROKEN: dict[str, Answer] = {
    "closed": close_before_answering,
    "hangs": hang,
    "not http": b"SSH-2.0-OpenSSH_9\r\n",
    "truncated": ok()[:-4],
    "truncated in the head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "garbage": ok(b"\x00\xff\xfe garbage"),
    "a login page": ok(b"<html>please log in</html>"),
    "other json": ok(b'{"stored":false}'),
    "unknown field": ok(b'{"stored":true,"more":1}'),
    "deep json": ok(b"[" * 100_000),
    "compressed": ok(Content_Encoding="gzip"),
    "chunk size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "unavailable": problem("503 Service Unavailable", "unavailable"),
    "rate limited": problem("429 Too Many Requests", "rate_limited"),
    "bad gateway": ok(b"<html>", "502 Bad Gateway"),
    "internal": problem("500 Internal Server Error", "internal"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_one_failure_is_mended_by_the_next_attempt(
    script: Script, make: Callable[..., Transport], pauses: list[float], fault: str
) -> None:
    script.answers = [BROKEN[fault], ok()]
    assert make().call("PUT", "/v1/x", Receipt, body=b"same bytes") == Receipt()
    assert [(method, body) for method, _, _, body in script.seen] == [("PUT", b"same bytes")] * 2
    assert pauses == [0.25]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("fault", BROKEN)
def test_lasting_failure_ends_in_one_documented_error(
    script: Script, make: Callable[..., Transport], pauses: list[float], fault: str
) -> None:
    script.answers = [BROKEN[fault]]
    with pytest.raises((UnreachableError, RefusedError)) as caught:
        make().call("GET", "/v1/x", Receipt)
    answered = fault in ("unavailable", "rate limited", "bad gateway", "internal")
    assert isinstance(caught.value, RefusedError) == answered
    assert len(script.seen) == 3
    assert pauses == [0.25, 0.5]


def test_an_answer_that_drips_is_given_up(script: Script, make: Callable[..., Transport]) -> None:
    script.answers = [drip]
    with pytest.raises(UnreachableError, match="took longer than"):
        make(request_timeout=0.3, attempts=1).call("GET", "/v1/x", Receipt)


def test_nobody_listens(make: Callable[..., Transport], pauses: list[float]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(UnreachableError, match="failed 3 times"):
        make(url=f"http://127.0.0.1:{port}").call("GET", "/v1/x", Receipt)
    assert pauses == [0.25, 0.5]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("400 Bad Request", "bad_request"), ("401 Unauthorized", "unauthorized"), ("403 Forbidden", "forbidden"),
        ("404 Not Found", "not_found"), ("409 Conflict", "conflict"), ("410 Gone", "gone"),
        ("413 Content Too Large", "too_large"), ("422 Unprocessable", "unprocessable"),
    ],
)  # fmt: skip
def test_a_refusal_is_final(script: Script, make: Callable[..., Transport], status: str, kind: str) -> None:
    for body in (problem(status, kind), ok(b"not json", status), ok(b"", status)):
        script.answers = [body]
        script.seen.clear()
        with pytest.raises(RefusedError) as caught:
            make().call("GET", "/v1/x", Receipt)
        assert (caught.value.status, caught.value.kind) == (int(status[:3]), kind)
        assert len(script.seen) == 1


def test_the_reason_is_passed_on(script: Script, make: Callable[..., Transport]) -> None:
    body = b'{"type":"a","title":"b","status":410,"detail":"the phase is over: since noon","request_id":"1"}'
    script.answers = [ok(body, "410 Gone")]
    with pytest.raises(RefusedError, match=r"the phase is over: since noon \(HTTP 410, gone\)"):
        make().call("GET", "/v1/x", Receipt)


def test_redirects_are_not_followed(script: Script, make: Callable[..., Transport]) -> None:
    script.answers = [ok(b"", "302 Found", Location=script.url + "/elsewhere"), ok()]
    with pytest.raises(RefusedError, match="HTTP 302"):
        make().call("GET", "/v1/x", Receipt)


@pytest.mark.parametrize(("value", "expected"), [("2", 2.0), ("0.5", 0.5), ("-3", 0.0), ("soon", 0.25), ("nan", 0.25)])
def test_retry_after_is_honoured(
    script: Script, make: Callable[..., Transport], pauses: list[float], value: str, expected: float
) -> None:
    script.answers = [problem("503 Service Unavailable", "unavailable", Retry_After=value), ok()]
    make().call("GET", "/v1/x", Receipt)
    assert pauses == [expected]


def test_a_retry_after_beyond_the_limit_is_left_to_the_caller(
    script: Script, make: Callable[..., Transport], pauses: list[float]
) -> None:
    script.answers = [problem("503 Service Unavailable", "unavailable", Retry_After="3600"), ok()]
    with pytest.raises(RefusedError) as caught:
        make(max_wait=60.0).call("GET", "/v1/x", Receipt)
    assert caught.value.retry_after == 3600
    assert pauses == []


def test_retry_after_as_a_date(script: Script, make: Callable[..., Transport], pauses: list[float]) -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    script.answers = [problem("503 Service Unavailable", "unavailable", Retry_After=date), ok()]
    make().call("GET", "/v1/x", Receipt)
    assert 25 < pauses[0] < 31


def test_size_is_limited_before_and_while_reading(script: Script, make: Callable[..., Transport]) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            handler.wfile.write(b"x" * 65536)

    script.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"]
    with pytest.raises(ClientError, match="has 99999999999 bytes, the limit here is 16777216"):
        make().call("GET", "/v1/x", Receipt)
    script.answers = [endless]
    with pytest.raises(ClientError, match="more than 16777216 bytes"):
        make().call("GET", "/v1/x", Receipt)


def test_a_large_page_instead_of_an_answer_is_no_answer(script: Script, make: Callable[..., Transport]) -> None:
    """As a network's login page, or a proxy's own page for an error: the device tries again later."""
    script.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"]
    with pytest.raises(UnreachableError, match="failed 3 times"):
        make().call("GET", "/v1/x", Receipt)
    script.answers = [ok(b"<p>" * 100_000, "503 Service Unavailable")]
    with pytest.raises(RefusedError, match="HTTP 503"):
        make().call("GET", "/v1/x", Receipt)
    script.answers = [ok(b"<p>" * 100_000, "403 Forbidden")[:-1]]
    with pytest.raises(RefusedError, match="HTTP 403"):
        make().call("GET", "/v1/x", Receipt)


def test_traffic_counts_bodies_exactly(script: Script, make: Callable[..., Transport]) -> None:
    script.answers = [ok(), problem("503 Service Unavailable", "unavailable"), ok()]
    transport = make()
    transport.call("PUT", "/v1/x", Receipt, body=b"12345")
    assert (transport.traffic.sent, transport.traffic.received) == (5, len(STORED))
    transport.call("PUT", "/v1/x", Receipt, body=b"12345")
    taken = transport.traffic.take()
    refused = len(problem("503 Service Unavailable", "unavailable").split(b"\r\n\r\n")[1])
    assert (taken.sent, taken.received, taken.requests) == (15, 2 * len(STORED) + refused, 3)
    assert taken.headers_sent > 3 * 50
    assert taken.headers_received > 0
    assert (transport.traffic.sent, transport.traffic.requests) == (0, 0)


def test_the_servers_clock_is_known_from_its_answers(script: Script, make: Callable[..., Transport]) -> None:
    transport = make()
    assert transport.server_time() is None
    script.answers = [ok(Date="Mon, 01 Jan 2035 00:00:00 GMT")]
    transport.call("GET", "/v1/x", Receipt)
    assert 2051222400 <= transport.server_time() < 2051222405


# --- downloads ----------------------------------------------------------------------------------------------------

DATA = bytes(range(256)) * 1000


def ranged(handler: BaseHTTPRequestHandler) -> None:
    wanted = handler.headers.get("Range")
    if wanted is None:
        handler.wfile.write(ok(DATA))
        return
    start, last = wanted.removeprefix("bytes=").split("-")
    first, stop = int(start), min(int(last or len(DATA)) + 1, len(DATA))
    if first >= len(DATA):
        handler.wfile.write(ok(b"", "416 Range Not Satisfiable", Content_Range=f"bytes */{len(DATA)}"))
        return
    span = f"bytes {first}-{stop - 1}/{len(DATA)}"
    handler.wfile.write(ok(DATA[first:stop], "206 Partial Content", Content_Range=span))


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(ok(DATA)[:100_000])


def test_a_download_that_breaks_is_continued(script: Script, make: Callable[..., Transport], tmp_path: Path) -> None:
    script.answers = [cut_off, ranged]
    target = tmp_path / "file"
    transport = make()
    transport.download("/v1/f", target, len(DATA))
    assert target.read_bytes() == DATA
    assert script.seen[1][2]["Range"].startswith("bytes=9")
    # Nothing was fetched twice.
    assert transport.traffic.received == len(DATA)


@pytest.mark.parametrize(("step", "reaches"), [(65_536, True), (70_000, True), (65_535, False), (1, False)])
def test_a_link_that_breaks_often_is_enough_as_long_as_bytes_come(
    script: Script, make: Callable[..., Transport], tmp_path: Path, step: int, reaches: bool
) -> None:
    """Attempts are counted from the last 64 KiB on; a server that sends less each time is given up."""

    def a_little(handler: BaseHTTPRequestHandler) -> None:
        start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        span = f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"
        head = f"HTTP/1.1 206 X\r\nContent-Range: {span}\r\nContent-Length: {len(DATA) - start}\r\n\r\n"
        whole = f"HTTP/1.1 200 X\r\nContent-Length: {len(DATA)}\r\n\r\n"
        handler.wfile.write((head if start else whole).encode() + DATA[start : start + step])

    script.answers = [a_little]
    transport, target = make(attempts=2), tmp_path / "file"
    if reaches:
        transport.download("/v1/f", target, len(DATA))
        assert target.read_bytes() == DATA
        assert len(script.seen) == -(-len(DATA) // step)
    else:
        with pytest.raises(UnreachableError, match="failed 2 times"):
            transport.download("/v1/f", target, len(DATA))
        assert len(script.seen) == 2 + (2 * step >= 65_536)


def test_a_part_from_before_a_restart_is_continued(
    script: Script, make: Callable[..., Transport], tmp_path: Path
) -> None:
    script.answers = [ranged]
    target = tmp_path / "file"
    target.write_bytes(DATA[:77])
    make().download("/v1/f", target, len(DATA))
    assert target.read_bytes() == DATA


def test_a_server_without_ranges_sends_all(script: Script, make: Callable[..., Transport], tmp_path: Path) -> None:
    script.answers = [ok(DATA)]
    target = tmp_path / "file"
    target.write_bytes(b"other")
    make().download("/v1/f", target, len(DATA))
    assert target.read_bytes() == DATA


def test_a_part_that_is_too_long_is_dropped(script: Script, make: Callable[..., Transport], tmp_path: Path) -> None:
    script.answers = [ranged]
    target = tmp_path / "file"
    target.write_bytes(DATA + b"more")
    make().download("/v1/f", target, len(DATA))
    assert target.read_bytes() == DATA


def test_a_part_that_is_the_whole_is_not_fetched_again(
    script: Script, make: Callable[..., Transport], tmp_path: Path
) -> None:
    script.answers = [ranged, ok(DATA)]
    target = tmp_path / "file"
    target.write_bytes(DATA)
    make().download("/v1/f", target, len(DATA))
    assert target.read_bytes() == DATA
    assert len(script.seen) == 1


def test_another_part_than_asked_for_is_not_taken(
    script: Script, make: Callable[..., Transport], tmp_path: Path
) -> None:
    last = len(DATA) - 1
    for span in (
        f"bytes 5-{last}/{len(DATA)}",
        f"bytes 77-{last - 1}/{len(DATA)}",
        f"bytes 77-{last}/{last}",
        f"bytes 77-{last}/*",
        "bytes 77-",
        "77",
    ):
        script.answers = [ok(DATA[77:], "206 Partial Content", Content_Range=span), ok(DATA)]
        target = tmp_path / "file"
        target.write_bytes(b"x" * 77)
        make().download("/v1/f", target, len(DATA))
        assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(DATA).digest(), span


def test_a_range_ends_where_it_was_asked_to(script: Script, make: Callable[..., Transport], tmp_path: Path) -> None:
    target, transport = tmp_path / "file", make()
    script.answers = [ranged, ranged]
    for stop in (1000, 1001):
        transport.download("/v1/f", target, len(DATA), stop=stop)
        assert target.read_bytes() == DATA[:stop]
    assert [headers["Range"] for _, _, headers, *_ in script.seen] == ["bytes=0-999", "bytes=1000-1000"]
    assert transport.traffic.received == 1001


@pytest.mark.parametrize("body", [DATA[:40], DATA[:60]], ids=["short", "long"])
def test_a_range_with_other_bytes_than_it_says_is_asked_for_again(
    script: Script, make: Callable[..., Transport], tmp_path: Path, body: bytes
) -> None:
    """Without Content-Length, so that only the range tells."""
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-49/{len(DATA)}\r\nConnection: close\r\n\r\n"
    script.answers = [head.encode() + body, ranged]
    target = tmp_path / "file"
    make().download("/v1/f", target, len(DATA), stop=50)
    assert target.read_bytes() == DATA[:50]
    assert script.seen[1][2]["Range"] == ("bytes=40-49" if len(body) == 40 else "bytes=0-49")


def test_a_download_has_a_limit(script: Script, make: Callable[..., Transport], tmp_path: Path) -> None:
    script.answers = [ok(DATA)]
    with pytest.raises(ClientError, match="limit here is 1000"):
        make().download("/v1/f", tmp_path / "file", 1000)
    (tmp_path / "file").write_bytes(DATA[:900])
    script.answers = [ranged]
    with pytest.raises(ClientError, match="limit here is 100"):
        make().download("/v1/f", tmp_path / "file", 1000)


@pytest.mark.sampled(every=3)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), prefix=st.sampled_from([b"", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\n", ok()[:-9]]))
def test_any_bytes_give_an_answer_or_the_documented_errors(
    script: Script, make: Callable[..., Transport], data: bytes, prefix: bytes
) -> None:
    script.answers = [prefix + data]
    try:
        make(attempts=1).call("GET", "/v1/x", Receipt)
    except ClientError:
        # UnreachableError and RefusedError are ClientErrors.
        return


def test_waits_differ_by_the_configured_share(make: Callable[..., Transport]) -> None:
    transport = make(poll_jitter=0.25)
    waits = [transport.jittered(8.0) for _ in range(200)]
    assert 6.0 <= min(waits) < 6.5 < 9.5 < max(waits) <= 10.0


@pytest.mark.parametrize("url", ["", "ftp://x", "example.org", "file:///etc/passwd"])
def test_urls_are_checked(make: Callable[..., Transport], url: str) -> None:
    with pytest.raises(ClientError, match="expected a URL"):
        make(url=url)
