"""The option --key: the publishers' public keys, with which commands verify a bundle before they use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import (
    development_key,
    development_key_file,
    is_development_key,
    load_private_key,
    load_public_key,
)
from archipel.errors import CommandError, DevelopmentKeyError, SignatureError

_TEXT = "The publisher's public key (FILE.pub of `archipel keys`); may be given several times."
_DEFAULT = "Default: your development key."

publisher_keys = click.option(
    "--key", "key_files", type=click.Path(path_type=Path), multiple=True, help=f"{_TEXT} {_DEFAULT}"
)
required_keys = click.option(
    "--key", "key_files", type=click.Path(path_type=Path), multiple=True, required=True, help=_TEXT
)
keys_for_bundles = click.option(
    "--key", "key_files", type=click.Path(path_type=Path), multiple=True, help=f"{_TEXT} For bundles. {_DEFAULT}"
)
"""For commands that also take an ONNX file, which nobody signs."""
signing_key = click.option(
    "--key",
    "key_file",
    type=click.Path(path_type=Path),
    help="The publisher's private key (FILE of `archipel keys`). Default: your development key.",
)
"""For commands that sign a bundle."""
allow_development = click.option(
    "--allow-development", is_flag=True, help="Also accept a development key, which is for trying out only."
)


def trusted_keys(path: Path, key_files: Sequence[Path]) -> list[bytes]:
    """The public keys in the files; without files that of the user's development key.

    Raises CommandError that names `path`, the bundle, where there is no key at all, SignatureError for a wrong file.
    """
    if key_files:
        return [load_public_key(file) for file in key_files]
    if not development_key_file().is_file():
        raise CommandError(f"{path}: a bundle is opened with its publisher's key; give --key FILE.pub")
    key, _ = development_key()
    return [key.public_key().public_bytes_raw()]


@contextmanager
def remedy_of(key_files: Sequence[Path]) -> Iterator[None]:
    """Add to a SignatureError from within what to do, where no --key was given."""
    try:
        yield
    except SignatureError as error:
        if key_files:
            raise
        raise SignatureError(f"{error}; that is your development key: give the publisher's, --key FILE.pub") from None


@contextmanager
def offer_option() -> Iterator[None]:
    """Name the option --allow-development in an error about a development key from within."""
    try:
        yield
    except DevelopmentKeyError as error:
        raise DevelopmentKeyError(
            f"{str(error).partition(';')[0]}; sign it with a key of `archipel keys FILE`, or give --allow-development"
        ) from None


def tell_development(publisher: bytes) -> None:
    """Say once on standard error, so that standard output has the results alone, if a development key signed."""
    told = click.get_current_context().meta
    if is_development_key(publisher) and not told.get(__name__):
        told[__name__] = True
        click.echo("signed with a development key: for trying out; devices and servers refuse it by default", err=True)


def read_signing_key(key_file: Path | None) -> Ed25519PrivateKey:
    """The private key in the file; without a file the user's development key, which is made if there is none.

    Says in one line on standard error that it is a development key. Raises SignatureError.
    """
    if key_file is not None:
        return load_private_key(key_file)
    key, made = development_key()
    click.echo(
        f"signing with {'a new' if made else 'your'} development key, {development_key_file()}: for trying out; "
        "devices and servers refuse it by default (`archipel keys FILE` makes a real one)",
        err=True,
    )
    return key
