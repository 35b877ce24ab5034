"""What is left of a connection that broke off."""

from __future__ import annotations

import gc
from pathlib import Path

from archipel.client import Agent, AgentConfig
from tests.support.linear_bundle import local_data
from tests.support.scripted_server import Reply, scripted


def two_lengths(reply: Reply) -> bytes:
    """An answer at which urllib3 gives up between the head and the body, where only the error refers to its socket."""
    return b"HTTP/1.1 200 X\r\nContent-Length: 1, 2\r\nConnection: close\r\n\r\n" + reply.body


def test_a_handshake_that_fails_leaves_no_socket_to_the_collector(tmp_path: Path) -> None:
    """A socket that the garbage collector closes is a ResourceWarning, which pytest takes for a failure."""
    with scripted(tmp_path) as server:
        config = AgentConfig(folder=tmp_path / "device", isolated=False, allow_plain=True, attempts=2, backoff=0.001)
        with Agent(config, examples=lambda: local_data(0)) as agent:
            agent.enrol(server.token())
            server.changes["session"] = [two_lengths]
            server.begin()
            gc.collect()
            agent.run_once()
            assert server.steps.count("session") == 2
            gc.collect()
