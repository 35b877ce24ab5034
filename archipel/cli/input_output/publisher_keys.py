"""The option --key: the publishers' public keys, with which commands verify a bundle before they use it."""

from __future__ import annotations

from pathlib import Path

import click

_TEXT = "The publisher's public key (FILE.pub of `archipel keys`); may be given several times."

publisher_keys = click.option(
    "--key", "key_files", type=click.Path(path_type=Path), multiple=True, required=True, help=_TEXT
)
keys_for_bundles = click.option(
    "--key", "key_files", type=click.Path(path_type=Path), multiple=True, help=f"{_TEXT} Needed for bundles."
)
"""For commands that also take an ONNX file, which nobody signs."""
