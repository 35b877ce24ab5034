"""`archipel keys`: Ed25519 key pairs."""

from __future__ import annotations

from pathlib import Path

import click

from archipel.bundle import generate_key, save_private_key, save_public_key


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def keys(file: Path) -> None:
    """Make a key pair: FILE (private, mode 0600) and FILE.pub (public, 64 hex digits).

    \b
    archipel keys publisher      signs bundles
    archipel keys enrolment      signs one-time tokens

    Keep private keys offline, and give FILE.pub to others.
    """
    key = generate_key()
    save_private_key(key, file)
    save_public_key(key, file.with_name(file.name + ".pub"))
    click.echo(f"private key   {file}   (never leaves this machine)")
    click.echo(f"public key    {file}.pub   {key.public_key().public_bytes_raw().hex()}")
