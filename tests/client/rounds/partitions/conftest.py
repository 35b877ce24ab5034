"""The server and its operator in one network, four devices on two cables in two others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tests.client.rounds.partitions.namespaces import Cable, Namespace, Network, UnsupportedError


@pytest.fixture
def network() -> Iterator[Network]:
    """The test's own thread is in the server's network."""
    with ExitStack() as stack:
        try:
            server, alone, others = (stack.enter_context(closing(Namespace())) for _ in range(3))
            made = Network(alone, others, Cable(alone, server, 1), Cable(others, server, 2))
            made.cable.cut("silent")
            made.cable.mend()
        except UnsupportedError as error:
            pytest.skip(str(error))
        stack.enter_context(server.entered())
        yield made


@pytest.fixture
def server_host(network: Network) -> str:
    return "0.0.0.0"
