"""The folder of a local federation: everything that its server, its operator and its devices need, each in its place.

keys/       the enrolment key, the publisher's and the server's public key, the operator's token
server/     the data folder of `archipel serve start`
devices/NAME/  device.toml of `archipel device run`, data.npz, enrolment.token, and the agent's folder
logs/       what the processes say
"""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from archipel.bundle import (
    generate_key,
    is_development_key,
    load_private_key,
    load_public_key,
    save_private_key,
    save_public_key,
)
from archipel.cli.input_output.arrays import write_arrays
from archipel.durable import create_durably, write_durably
from archipel.protocol.identity import EnrolmentToken, Kind, mint_token, root_of
from archipel.protocol.messages import Root
from archipel.protocol.sealed import encode
from archipel.server import init_data_folder, load_settings
from archipel.server.upstream_settings import Upstream

QUICK_DEVICES = 10
"""Servers let so many devices ask for work every 0.2 s; more may do so here, since all are on one machine."""
_TOKEN_SECONDS = 365 * 86400
_DEVICE = """\
# One device: `archipel device run device.toml` runs it. docs/agent.md has every setting.
folder = "agent"
server = "{server}"
allow_development = {development}
# adopt = true         # take the versions of models that the server offers
# look_seconds = 5.0   # for trying that out: how long it is silent after it has looked at one (else 120)

[examples]
file = "data.npz"
"""


@dataclass(frozen=True)
class Layout:
    """Where things are in the folder of a local federation."""

    folder: Path

    @property
    def server(self) -> Path:
        return self.folder / "server"

    @property
    def operator_token(self) -> Path:
        return self.folder / "keys" / "operator.token"

    @property
    def enrolment_key(self) -> Path:
        return self.folder / "keys" / "enrolment"

    @property
    def publisher_key(self) -> Path:
        """The public half."""
        return self.folder / "keys" / "publisher.pub"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def device(self, name: str) -> Path:
        return self.folder / "devices" / name

    @property
    def devices(self) -> list[str]:
        """The devices' names, in the order of their numbers."""
        return sorted((path.name for path in self.folder.glob("devices/*")), key=lambda name: (len(name), name))


def lay_out(
    folder: Path,
    *,
    population: str,
    publisher: bytes,
    devices: Mapping[str, Mapping[str, np.ndarray]],
    upstream: EnrolmentToken | None = None,
) -> Layout:
    """Fill a folder with a server, keys, and devices that can enrol once.

    Arguments:
        folder: is made, or has none of these things.
        population: the devices' population.
        publisher: the public key (32 bytes) whose bundles the server accepts; a development key is allowed.
        devices: each device's examples, arrays by field, by its name.
        upstream: of an edge server, the token with which it joins the server above it. All its devices are in each of
            its rounds for that one, which wait for all but one.
    """
    made = Layout(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made.enrolment_key.parent.mkdir(mode=0o700)
    enrolment = generate_key()
    save_private_key(enrolment, made.enrolment_key)
    save_public_key(enrolment, made.enrolment_key.with_name("enrolment.pub"))
    development = is_development_key(publisher)
    above = None
    if upstream is not None:
        above = Upstream(population=population, cohort=len(devices), goal=len(devices) - 1)
    token = init_data_folder(
        made.server,
        enrolment_key=enrolment.public_key().public_bytes_raw(),
        publisher_keys=[publisher],
        allow_development=development,
        upstream=None if above is None or upstream is None else (above, encode(upstream)),
    )
    create_durably(made.operator_token, token.encode() + b"\n")
    create_durably(made.publisher_key, publisher.hex().encode() + b"\n", 0o644)
    shutil.copy(made.server / "server.key.pub", made.operator_token.with_name("server.pub"))
    settings = made.server / "server.toml"
    port = _free_port()
    added = f"port = {port}\nsmallest_answer = 1\nleave_seconds = 1.0\n"
    if len(devices) > QUICK_DEVICES:
        added += "retry_after = 0.25\ncheck_in_window = 5.0\n"
    text, table, rest = settings.read_text().partition("\n[upstream]")
    write_durably(settings, (text.rstrip("\n") + "\n" + added + table + rest).encode(), 0o600)
    address = f"http://127.0.0.1:{port}"
    for name, fields in devices.items():
        home = made.device(name)
        home.mkdir(mode=0o700, parents=True)
        write_arrays(home / "data.npz", fields)
        text = _DEVICE.format(server=address, development="true" if development else "false")
        write_durably(home / "device.toml", text.encode(), 0o644)
        root = None if upstream is None else root_of(upstream)
        write_durably(home / "enrolment.token", encode(mint(made, population, root=root)), 0o600)
    return made


def mint(layout: Layout, population: str, *, kind: Kind = "device", root: Root | None = None) -> EnrolmentToken:
    """A new one-time enrolment token. `root`: of the tree that the server is an edge server of."""
    seed, settings = secrets.token_bytes(32), load_settings(layout.server, environment={})
    enrolment = load_private_key(layout.enrolment_key)
    not_after = int(time.time()) + _TOKEN_SECONDS
    return EnrolmentToken(
        server=f"http://127.0.0.1:{settings.port}",
        server_key=load_public_key(layout.server / "server.key.pub"),
        enrolment_key=enrolment.public_key().public_bytes_raw(),
        publisher_keys=settings.trusted_keys,
        population=population,
        seed=seed,
        certificate=mint_token(enrolment, population=population, not_after=not_after, seed=seed, kind=kind),
        root=root,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
