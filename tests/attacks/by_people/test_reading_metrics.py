"""Somebody who must not read the metrics wants to, or fills them with labels.

Who: a stranger who reaches the server's port; a stranger in the network; a web page in a browser on the server's own
machine, whose name its owner makes point to 127.0.0.1 (DNS rebinding); a device. What they want: names of populations
and models and how much is going on, or so many labels that the server's memory and Prometheus's are full. What stops
them: metrics are on a port of their own, on loopback unless there is a token; a request must name that port by address;
the token goes over TLS where the server has a certificate; no label is from outside.
"""

from __future__ import annotations

import hashlib
import signal
import socket
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from archipel.errors import ServerError
from archipel.protocol.tls import client_context
from archipel.server.app import create_app
from archipel.server.settings import load_settings
from tests.server.processes.tls.authority import Authority
from tests.support.fixtures.server import bundle_file, data_folder, empty_database, keys, world  # noqa: F401
from tests.support.scraping import FlushedRegistry, free_port, samples_of, scrape
from tests.support.serving import Server
from tests.support.world import NO_LIMITS, DataFolder, World

TOKEN = "a token of the operator's own"
HASH = hashlib.sha256(TOKEN.encode()).hexdigest()


@pytest.fixture
def server(data_folder: DataFolder) -> Iterator[Server]:  # noqa: F811
    made = Server(data_folder[0])
    yield made
    if made.alive:
        made.stop(signal.SIGKILL)


def refused(port: int, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        scrape(port, **headers)
    assert b"archipel_" not in error.value.read()
    return error.value.code


@pytest.mark.sampled(every=4)
def test_the_devices_port_does_not_show_them_and_pages_cannot_read_them(server: Server) -> None:
    port = free_port()
    url = server.start(metrics_port=str(port))
    for path in ("/metrics", "/v1/metrics", "/metrics/"):
        assert urllib3.request("GET", url + path).status == 404
    assert "archipel_lease_held" in scrape(port)
    assert "archipel_lease_held" in scrape(port, Host="localhost")
    # What a browser sends for a page of evil.example, or of a name that looks like an address.
    for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        assert refused(port, Host=name) == 403
    assert server.stop() == 0


@pytest.mark.sampled(every=8)
def test_with_a_token_only_who_has_it(server: Server) -> None:
    port = free_port()
    server.start(metrics_port=str(port), metrics_token_sha256=HASH)
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {HASH}"},
        {"Authorization": TOKEN},
    ):
        assert refused(port, **header) == 401
    assert "archipel_lease_held" in scrape(port, Authorization=f"Bearer {TOKEN}")
    assert TOKEN not in (server.folder / "server.log").read_text()
    assert server.stop() == 0


@pytest.mark.sampled(every=4)
def test_the_token_goes_over_tls_alone_where_the_server_has_a_certificate(server: Server, tmp_path: Path) -> None:
    authority, port = Authority(tmp_path, "authority"), free_port()
    certificate, key = authority.certify("server")
    own = authority.certify("scraper")
    server.start(
        metrics_port=str(port), metrics_host="0.0.0.0", metrics_token_sha256=HASH, tls_certificate=str(certificate),
        tls_key=str(key), tls_client_ca=str(authority.file),
    )  # fmt: skip
    token = {"Authorization": f"Bearer {TOKEN}"}
    assert "archipel_lease_held" in scrape(port, tls=client_context(authority.file, *own), **token)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        scrape(port, tls=client_context(authority.file, *own))
    # In the clear, to somebody else, or without the reader's certificate nothing is shown.
    for tls in (None, client_context(Authority(tmp_path, "another").file, *own), client_context(authority.file)):
        with pytest.raises((urllib.error.URLError, OSError)):
            scrape(port, tls=tls, **token)
    # Silent readers do not keep others waiting.
    with socket.create_connection(("127.0.0.1", port)):
        assert "archipel_lease_held" in scrape(port, tls=client_context(authority.file, *own), **token)
    assert server.stop() == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "metrics.example", "localhost.example"])
def test_no_other_machine_reaches_them_without_a_token(data_folder: DataFolder, host: str) -> None:  # noqa: F811
    with pytest.raises(ServerError, match="metrics_token_sha256"):
        load_settings(data_folder[0], environment={}, metrics_port=9470, metrics_host=host)
    load_settings(data_folder[0], environment={}, metrics_port=9470, metrics_host=host, metrics_token_sha256=HASH)


@pytest.fixture
def server_settings() -> dict[str, object]:
    return dict(NO_LIMITS)


@pytest.mark.sampled(every=4)
def test_no_label_is_from_outside(world: World) -> None:  # noqa: F811
    registry = FlushedRegistry()
    world.app.extensions["archipel"].database.dispose()
    world.app = create_app(world.settings, clock=world.clock, measures=registry.measures)
    [device] = world.add_devices(1)
    world.transport("GET", "/v1/models/first", None, {})
    world.transport("GET", "/first", None, {})
    world.transport("FIRST", "/v1/check-ins", None, {})
    before = set(samples_of(registry))
    for number in range(200):
        world.transport("GET", f"/v1/models/m{number}", None, {})
        world.transport("GET", f"/secret-{number}", None, {})
        world.transport(f"M{number}", "/v1/check-ins", None, {})
    assert set(samples_of(registry)) == before
    shown = " ".join(value for _, labels in before for _, value in labels)
    assert device.id not in shown
    assert "first" not in shown.lower()
