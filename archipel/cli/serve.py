"""`archipel serve`: set up and run a federation server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from archipel.bundle import load_private_key, load_public_key, save_public_key
from archipel.server import copy_files, init_data_folder, load_settings, supervise


@click.group()
def serve() -> None:
    """Set up and run a federation server: `init` once, then `start`."""


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--enrolment-key", type=click.Path(path_type=Path), required=True, help="Public enrolment key.")
@click.option(
    "--publisher-key",
    "publisher_keys",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Public key of who may publish bundles; may be given several times.",
)
def init(folder: Path, enrolment_key: Path, publisher_keys: tuple[Path, ...]) -> None:
    """Make a data folder: settings, the server's key, and the operator token, which is shown once.

    The keys are public halves (FILE.pub of `archipel keys`); the private ones stay offline.
    """
    token = init_data_folder(
        folder,
        enrolment_key=load_public_key(enrolment_key),
        publisher_keys=[load_public_key(file) for file in publisher_keys],
    )
    public = folder / "server.key.pub"
    save_public_key(load_private_key(folder / "server.key"), public)
    click.echo(f"data folder      {folder}")
    click.echo(f"server key       {public}   (devices pin it: `archipel token --server-key`)")
    click.echo(f"operator token   {token}   (shown once; keep it safe)")


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--host", help="Address to listen on; default: the settings', then 127.0.0.1.")
@click.option("--port", type=int, help="Port, 0 for a free one; default: the settings', then 8470.")
def start(folder: Path, host: str | None, port: int | None) -> None:
    """Serve until Ctrl-C or SIGTERM: gunicorn and one coordinator, watched and restarted."""
    overrides: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    supervise(load_settings(folder, **overrides), announce=lambda line: click.echo(line))


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("blobs")
def copy(folder: Path, blobs: str) -> None:
    """Copy a stopped server's bundles, weights and updates to BLOBS, a folder or s3://BUCKET/PREFIX, and verify them.

    It can be run again after an interruption. The server uses the copy once its setting `blobs` says so.
    """
    done = copy_files(load_settings(folder), blobs)
    click.echo(f"{done.files} files copied ({done.bytes} bytes), {done.there} were there; all have their digests")
    click.echo(f"the server uses them with the setting  blobs = {json.dumps(blobs)}")
