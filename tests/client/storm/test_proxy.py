"""The proxy through which the agents of a storm reach their server."""

from __future__ import annotations

import socket

from tests.support.faults import Proxy, running


def test_what_a_killed_agent_had_sent_of_a_request_is_no_request() -> None:
    head = "PUT /v1/rounds/1/update HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with running(Proxy(target=1)) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.server_port)) as agent:
            agent.sendall(head.encode() + b"x" * 60)
            agent.shutdown(socket.SHUT_WR)
            assert agent.recv(1000) == b""  # closed without an answer
        assert proxy.came == []
        with socket.create_connection(("127.0.0.1", proxy.server_port)) as agent:
            agent.sendall(head.encode() + b"x" * 100)
            assert agent.recv(1000) == b""  # closed, as nobody listens where the proxy passes it on to
        assert proxy.came == [("PUT", "/v1/rounds/1/update", b"x" * 100)]
