"""`archipel keys`: Ed25519 key pairs."""

from __future__ import annotations

from pathlib import Path

import click

from archipel.bundle import development_key, development_key_file, generate_key, save_private_key, save_public_key


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
def keys(file: Path | None) -> None:
    """Make a key pair: FILE (private, mode 0600) and FILE.pub (public, 64 hex digits).

    \b
    archipel keys publisher      signs bundles
    archipel keys enrolment      signs one-time tokens
    archipel keys                makes or shows your development key

    Keep private keys offline, and give FILE.pub to others.

    A development key is for trying out: `archipel convert` takes it where no --key is given, and your own commands
    accept it. Devices and servers recognise every such key and refuse it unless they are told otherwise.
    """
    if file is None:
        key, made = development_key()
        click.echo(f"development key   {development_key_file()}   ({'made now' if made else 'there already'})")
        click.echo(f"public key        {key.public_key().public_bytes_raw().hex()}")
        click.echo("for trying out: devices and servers refuse it by default; `archipel keys FILE` makes a real one")
        return
    key = generate_key()
    save_private_key(key, file)
    save_public_key(key, file.with_name(file.name + ".pub"))
    click.echo(f"private key   {file}   (never leaves this machine)")
    click.echo(f"public key    {file}.pub   {key.public_key().public_bytes_raw().hex()}")
