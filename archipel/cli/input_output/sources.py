"""What commands that take a model open: a model file, a bundle with or without learned weights, a saved fit, a slot."""

from __future__ import annotations

from pathlib import Path

import click

learned_weights = click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="Learned parameters of a bundle (FILE of `archipel task download` or `archipel model download`).",
)
