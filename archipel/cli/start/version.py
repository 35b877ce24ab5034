"""`archipel version`."""

from __future__ import annotations

import click

import archipel


@click.command()
def version() -> None:
    """Print the version of archipel.

    \b
    archipel version
    """
    click.echo(archipel.__version__)
