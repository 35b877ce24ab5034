"""`archipel serve`: set up and run a federation server."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from archipel.bundle import load_public_key
from archipel.durable import creating
from archipel.server import back_up, copy_files, init_data_folder, load_settings, supervise
from archipel.server import restore as restore_backup


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
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="New file (mode 0600) for the operator token; else it is shown.",
)
def init(folder: Path, enrolment_key: Path, publisher_keys: tuple[Path, ...], token_file: Path | None) -> None:
    """Make a data folder: settings, the server's key, and the operator token, which is shown or written once.

    FOLDER is new or empty. The keys are public halves (FILE.pub of `archipel keys`); the private ones stay offline.
    """
    enrolment, publishers = load_public_key(enrolment_key), [load_public_key(file) for file in publisher_keys]
    with ExitStack() as stack:
        # Before the token is made: there is no second chance to keep it.
        kept = None if token_file is None else stack.enter_context(creating(token_file))
        token = init_data_folder(folder, enrolment_key=enrolment, publisher_keys=publishers)
        if kept is not None:
            kept.write(token.encode() + b"\n")
    click.echo(f"data folder      {folder}")
    click.echo(f"server key       {folder / 'server.key.pub'}   (devices pin it: `archipel token --server-key`)")
    click.echo(f"operator token   {token_file or token}   ({'' if token_file else 'shown once; '}keep it safe)")


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--host", help="Address to listen on; default: the settings', then 127.0.0.1.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port, 0 for a free one; default: the settings', then 8470."
)
def start(folder: Path, host: str | None, port: int | None) -> None:
    """Serve until Ctrl-C or SIGTERM: gunicorn and one coordinator, watched and restarted."""
    overrides: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    supervise(load_settings(folder, **overrides), announce=lambda line: click.echo(line))


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("blobs")
def copy(folder: Path, blobs: str) -> None:
    """Copy a stopped server's bundles, weights and updates to BLOBS, a folder or s3://BUCKET/PREFIX, and verify them.

    A relative path starts in the working directory. It can be run again after an interruption. The server uses the copy
    once its setting `blobs` says so.
    """
    if "://" not in blobs:
        blobs = os.path.abspath(blobs)
    done = copy_files(load_settings(folder), blobs)
    click.echo(f"{done.files} files copied ({done.bytes} bytes), {done.there} were there; all have their digests")
    click.echo(f"the server uses them with the setting  blobs = {json.dumps(blobs)}")


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def backup(folder: Path, target: Path) -> None:
    """Copy all that a server keeps to TARGET, a new folder, while it runs: database, files, settings, server key.

    TARGET is relative to the working directory and not in FOLDER.

    \b
    A database on PostgreSQL is left to its own tools. Dump it first, then run this:
        pg_dump --format=custom --file=archipel.dump DATABASE
    """
    done = back_up(load_settings(folder), target)
    click.echo(f"{target}: {done.files} files ({done.bytes} bytes), all have their digests")
    if not done.database:
        click.echo("the database is on PostgreSQL and not in it: pg_dump must have run before this")
    click.echo("it holds the server's private key: keep it as safe as the server")


@serve.command()
@click.argument("backup", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def restore(backup: Path, folder: Path) -> None:
    """Make FOLDER, a new data folder, of a BACKUP; `archipel serve start FOLDER` then goes on from there."""
    done = restore_backup(backup, folder)
    click.echo(f"{folder}: {done.files} files ({done.bytes} bytes), all have their digests")
    if not done.database:
        click.echo("the backup has no database: pg_restore it, and set `database` to it")
    click.echo("a round that was under way may fail, and is tried again; keep the old server from starting")
