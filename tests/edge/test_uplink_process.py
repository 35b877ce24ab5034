"""The uplink of an edge server begins again after a kill or an error; an upstream that is away stops nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from archipel import bundle as b
from archipel.edge.uplink import read_upstream_token
from archipel.errors import ServerError
from archipel.protocol.sealed import encode
from tests.support.tree import make_node


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.sampled(every=8)
def test_it_is_started_again_and_waits_for_an_upstream_that_is_away(tmp_path: Path) -> None:
    publisher = b.generate_key()
    root = make_node(tmp_path, "root", publisher, "sites")
    root.server.url = "http://127.0.0.1:9"  # nobody listens there
    edge = make_node(tmp_path, "edge", publisher, "pupils", below=root)
    edge.start()
    try:
        first = edge.server.children()["coordinator"]
        until(lambda: "127.0.0.1:9" in (edge.folder / "server.log").read_text())
        os.kill(first, signal.SIGKILL)
        until(lambda: edge.server.children().get("coordinator", first) != first)
        before = len((edge.folder / "server.log").read_text())
        until(lambda: "upstream: " in (edge.folder / "server.log").read_text()[before:])
        assert list(edge.operator.tasks.list()) == []
    finally:
        assert edge.server.stop() == 0


@pytest.mark.sampled(every=6)
def test_one_that_cannot_begin_says_why_and_the_server_goes_on(tmp_path: Path) -> None:
    publisher = b.generate_key()
    root = make_node(tmp_path, "root", publisher, "sites")
    root.server.url = "http://127.0.0.1:9"
    edge = make_node(tmp_path, "edge", publisher, "pupils", below=root)
    right = (edge.folder / "upstream.token").read_bytes()
    (edge.folder / "upstream.token").unlink()
    edge.start()
    try:
        log = edge.folder / "server.log"
        until(lambda: log.read_text().count("upstream.token: cannot be read") >= 2)
        assert list(edge.operator.tasks.list()) == []
        assert "coordinator process" not in log.read_text()
        (edge.folder / "upstream.token").write_bytes(right)
        until(lambda: "127.0.0.1:9" in log.read_text())
    finally:
        assert edge.server.stop() == 0


def test_a_token_that_is_no_edge_server_s_is_named(tmp_path: Path) -> None:
    root = make_node(tmp_path, "root", b.generate_key(), "sites")
    path = tmp_path / "upstream.token"
    with pytest.raises(ServerError, match=r"upstream\.token: cannot be read .*archipel token --aggregator"):
        read_upstream_token(path)
    path.write_bytes(b"{}")
    with pytest.raises(ServerError, match="no enrolment token"):
        read_upstream_token(path)
    path.write_bytes(encode(root.token()))
    with pytest.raises(ServerError, match="a token for a device; an edge server needs one"):
        read_upstream_token(path)
    path.write_bytes(encode(root.token("aggregator")))
    assert read_upstream_token(path).population == "sites"
