"""`archipel token`: mint one-time enrolment tokens, offline."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import click
import msgspec

from archipel.bundle import load_private_key, load_public_key
from archipel.cli.input_output.enrolment_tokens import read_token
from archipel.durable import create_durably
from archipel.errors import CommandError
from archipel.protocol.address import check_url
from archipel.protocol.identity import EnrolmentToken, Kind, mint_token, root_of
from archipel.protocol.messages import Name
from archipel.protocol.sealed import encode


@click.command()
@click.option(
    "--enrolment-key", type=click.Path(path_type=Path), required=True, help="The private enrolment key (PEM)."
)
@click.option("--server-key", type=click.Path(path_type=Path), required=True, help="The server's public key file.")
@click.option(
    "--publisher-key",
    "publisher_keys",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Public key of a publisher whose bundles devices accept; may be given several times.",
)
@click.option("--server", required=True, help="The server's address, such as https://federation.example:8443")
@click.option("--allow-http", is_flag=True, help="Allow a plain http:// address of another machine.")
@click.option("--population", required=True, help="Name of the population the devices join.")
@click.option(
    "--days", type=click.IntRange(1, 3650), default=30, show_default=True, help="How long a token can be used."
)
@click.option(
    "--count",
    type=click.IntRange(1, 1_000_000),
    default=1,
    show_default=True,
    help="How many tokens; each enrols one device.",
)
@click.option("--aggregator", is_flag=True, help="For edge servers, which join by `serve init --upstream-token`.")
@click.option(
    "--upstream-token",
    type=click.Path(path_type=Path),
    help="For devices of an edge server: the token with which it joins its upstream; devices pin the root of it.",
)
@click.argument("folder", type=click.Path(path_type=Path))
def token(
    enrolment_key: Path,
    server_key: Path,
    publisher_keys: tuple[Path, ...],
    server: str,
    allow_http: bool,
    population: str,
    days: int,
    count: int,
    aggregator: bool,
    upstream_token: Path | None,
    folder: Path,
) -> None:
    """Make one-time enrolment tokens in FOLDER, one file (mode 0600) for each device or edge server.

    \b
    archipel token --enrolment-key enrolment --server-key federation/server.key.pub --publisher-key publisher.pub \\
        --server https://federation.example --population pupils --count 16 tokens
    archipel token --enrolment-key enrolment --server-key federation/server.key.pub --publisher-key publisher.pub \\
        --server https://federation.example --population hospitals --aggregator --count 3 tokens
    archipel token --enrolment-key ward --server-key edge/server.key.pub --publisher-key publisher.pub \\
        --server https://edge.example --population patients --upstream-token hospital.token --count 16 tokens

    The command runs offline: the server never sees the enrolment key, so it cannot invent devices.
    """
    check_url(server, "--server", allow_http=allow_http, setting="--allow-http")
    try:
        msgspec.convert(population, Name)
    except msgspec.ValidationError:
        raise CommandError(
            f"--population: expected up to 128 letters, digits, '.', '_' and '-', the first a letter or digit, "
            f"got {population[:100]!r}"
        ) from None
    key = load_private_key(enrolment_key)
    pinned = load_public_key(server_key)
    publishers = [load_public_key(file) for file in publisher_keys]
    root = None if upstream_token is None else root_of(read_token(upstream_token))
    kind: Kind = "aggregator" if aggregator else "device"
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(count):
        # The seed is the token's private key: the device signs its enrolment with it, and the server has no copy.
        seed = secrets.token_bytes(32)
        not_after = int(time.time()) + days * 86400
        certificate = mint_token(key, population=population, not_after=not_after, seed=seed, kind=kind)
        document = EnrolmentToken(
            server=server,
            server_key=pinned,
            enrolment_key=key.public_key().public_bytes_raw(),
            publisher_keys=publishers,
            population=population,
            seed=seed,
            certificate=certificate,
            root=root,
        )
        # A random name, so that a second call adds to the folder; `create_durably` never replaces a file.
        path = folder / f"{population}-{secrets.token_hex(4)}.token"
        create_durably(path, encode(document))
        click.echo(path)
