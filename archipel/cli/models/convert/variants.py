"""The option --variants of `archipel convert`: which bundles of the model a release has, and how each is made."""

from __future__ import annotations

from collections.abc import Callable

import click

from archipel.cli.models.option_groups import CompressionOptions
from archipel.compression import Progress
from archipel.compression.recipe import load_recipe
from archipel.converter.options import Compression
from archipel.converter.variants import PRESETS, SMALL, variant_recipes
from archipel.errors import CommandError

variants_option = click.option(
    "--variants",
    metavar="NAMES",
    help=f"Make a release of several bundles, of which devices take the best that fits: some of {','.join(PRESETS)}.",
)


def read_variants(
    text: str, options: CompressionOptions, on_progress: Callable[[Progress], None]
) -> dict[str, Compression | None]:
    """The recipes of the variants in `text`, names with commas between, with the examples in the files of `options`.

    Raises CommandError before any file of examples is read, and what reading raises.
    """
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != len(names) or not set(names) <= set(PRESETS):
        raise CommandError(f"--variants {text}: expected some of {', '.join(PRESETS)}, each once, with commas between")
    if options.recipe is not None and "small" not in names:
        raise CommandError("--recipe with --variants is the recipe of the variant small; add it to --variants")
    if "int8" in names and options.calibration is None and options.data is None:
        raise CommandError(
            "--variants: int8 needs examples for the ranges of activations; give --calibration FILE or --data FILE"
        )
    small = SMALL if options.recipe is None else tuple(load_recipe(options.recipe))
    if "small" in names and options.data is None and any("data" in part.needs for part in small):
        what = "removes channels and trains" if options.recipe is None else "trains"
        raise CommandError(f"--variants: small {what} the rest again; give labelled examples with --data FILE")
    if set(names) == {"float"} and any((*options.files.values(), options.work)):
        raise CommandError("--variants float compresses nothing; leave out --data, --calibration, --validation, --work")
    return variant_recipes(
        names,
        **options.read_sets(),
        small=small,
        seed=options.seed,
        engine=options.engine,
        folder=options.work,
        on_progress=on_progress,
    )
