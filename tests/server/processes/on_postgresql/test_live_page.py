"""The page of a task at a whole server: TLS, PostgreSQL, two web processes, a proxy that cuts connections off."""

from __future__ import annotations

import http.client
import re
import signal
import ssl
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.tls import client_context
from tests.server.processes.tls.authority import Authority
from tests.support.devices import POPULATION
from tests.support.event_stream import EventStream
from tests.support.idle_proxy import cutting
from tests.support.patience import stretched
from tests.support.serving import Server
from tests.support.visitors import CSRF
from tests.support.world import DataFolder

SOON = 2.0
IDLE = 1.0
"""Seconds of silence after which the proxy cuts a connection off; a page of a waiting task says nothing for longer."""


class Tab:
    """What a browser sends, without its scripts."""

    def __init__(self, port: int, tls: ssl.SSLContext) -> None:
        self.origin, self._tls, self._port, self.cookie = f"https://127.0.0.1:{port}", tls, port, ""
        self._open: list[tuple[http.client.HTTPSConnection, http.client.HTTPResponse]] = []
        self._streams: list[EventStream] = []

    def close(self) -> None:
        """After the server has ended, and all streams with it."""
        for stream in self._streams:
            stream.join()
        for line, answer in self._open:
            answer.close()
            line.close()

    def send(self, method: str, path: str, form: dict[str, str] | None = None) -> http.client.HTTPResponse:
        """The answer, not read yet. Each request has a connection of its own."""
        line = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=stretched(10), context=self._tls)
        body = None if form is None else urllib.parse.urlencode(form)
        headers = {"Origin": self.origin, **({"Cookie": self.cookie} if self.cookie else {})}
        headers |= {} if form is None else {"Content-Type": "application/x-www-form-urlencoded"}
        line.request(method, path, body, headers)
        answer = line.getresponse()
        self._open.append((line, answer))
        for name, value in answer.getheaders():
            if name == "Set-Cookie":
                self.cookie = value.partition(";")[0]
        return answer

    def page(self, path: str) -> str:
        answer = self.send("GET", path)
        assert answer.status == 200, path
        return answer.read().decode()

    def follow(self, task: str, after: str) -> EventStream:
        answer = self.send("GET", f"/dashboard/tasks/{task}/events?after={after}")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")

        def parts() -> Iterator[bytes]:
            try:
                while part := answer.read1(65536):
                    yield part
            except (http.client.IncompleteRead, OSError):
                return  # the proxy has cut it off

        self._streams.append(EventStream(parts()))
        return self._streams[-1]


@pytest.mark.sampled(every=6)
def test_a_page_follows_its_task(data_folder: DataFolder, bundle_file: Path, database_url: str, tmp_path: Path) -> None:
    folder, token, _ = data_folder
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.certify("server")
    server = Server(folder)
    url = server.start(
        tls_certificate=str(certificate), tls_key=str(key), database=database_url, workers="2", smallest_answer="1"
    )
    tls = client_context(authority.file)
    try:
        with (
            cutting(int(url.rpartition(":")[2]), IDLE) as proxy,
            closing(Tab(proxy.port, tls)) as tab,
            OperatorClient(url, token, tls=tls) as operator,
        ):
            bundle = operator.bundles.upload(bundle_file).digest
            request = TaskRequest(name="live", population=POPULATION, bundle=bundle, rounds=1, cohort=3, min_cohort=3)
            task = operator.tasks.create(request).task_id
            assert tab.send("POST", "/dashboard/login", {"token": token}).status == 303
            page = tab.page(f"/dashboard/tasks/{task}")
            assert CSRF.search(page) is not None
            shown = re.search(r'data-version="([0-9a-f.]+)"', page)
            assert shown is not None
            stream = tab.follow(task, shown[1])
            newest = shown[1]
            # Nothing happens, but for what the page finds out about who waits; so the proxy cuts the stream off.
            while (event := stream.next(stretched(10 * IDLE))) is not None:
                newest = event.id
            assert len(proxy.cuts) >= 1
            stream = tab.follow(task, newest)
            operator.tasks.pause(task)
            event = stream.until("paused", stretched(SOON))
            stream = tab.follow(task, event.id)
            operator.tasks.cancel(task)
            stream.until("cancelled", stretched(SOON))
            assert server.stop() == 0
    finally:
        if server.alive:
            server.stop(signal.SIGKILL)
