"""`archipel version`."""

from __future__ import annotations

import click

import archipel


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(archipel.__version__)
