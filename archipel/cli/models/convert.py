"""`archipel convert`: a model file becomes a signed bundle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Bundle, load_private_key
from archipel.cli.models.convert_list import ALL, LISTS, list_text
from archipel.cli.models.option_groups import (
    DEFAULT_RECIPE,
    CompressionOptions,
    compression_options,
    note_default_recipe,
    option_group,
)
from archipel.cli.models.progress import catch_ctrl_c, progress_callback, progress_line, resume_hint
from archipel.cli.models.releases import release_text
from archipel.cli.models.training_options import TrainingOptions, training_options
from archipel.cli.models.variants import read_variants, variants_option
from archipel.compression import Progress
from archipel.compression.recipe import check_sets, load_recipe
from archipel.converter import Compression, Signing
from archipel.converter.options import DAY, VALID_DAYS
from archipel.converter.pipeline import make_bundle
from archipel.converter.request import Request
from archipel.converter.variants import make_release
from archipel.errors import CommandError


@dataclass(frozen=True)
class ValidityOptions:
    """Which devices may use the bundle, until when, and which bundles it replaces."""

    populations: tuple[str, ...]
    valid_days: int
    sequence: int

    def signing(self, key: Ed25519PrivateKey) -> Signing:
        """The same for `convert`, with the publisher's key. Raises ConversionError."""
        # A whole number of days, so that bundles that are made on one day are the same.
        end = (int(time.time()) // DAY + self.valid_days) * DAY if self.valid_days else 0
        return Signing(key, sequence=self.sequence, not_after=end, populations=self.populations)


validity_options = option_group(
    "validity",
    ValidityOptions,
    click.option(
        "--population",
        "populations",
        multiple=True,
        help="A population that may use it; may be given several times. Default: any.",
    ),
    click.option("--valid-days", type=click.IntRange(0, 36500), default=VALID_DAYS, show_default=True,
                 help="How many days devices train with it and adopt it; predicting has no end. 0: no end."),
    click.option("--sequence", type=click.IntRange(0), default=0, show_default=True,
                 help="A greater number ends the use of all bundles of this name with a smaller one."),
)  # fmt: skip


def _list(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(list_text(value))
        ctx.exit()


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
              help="The bundle: a file if it ends in .bundle, else a folder; must not exist.")  # fmt: skip
@click.option("--key", "key_file", type=click.Path(path_type=Path), required=True,
              help="The publisher's private key (FILE of `archipel keys`).")  # fmt: skip
@training_options
@click.option("--name", help="The bundle's name. Default: the output's.")
@validity_options
@compression_options
@variants_option
@click.option("--list", "what", type=click.Choice([*LISTS, ALL]), is_flag=False, flag_value=ALL, is_eager=True,
              expose_value=False, callback=_list,
              help="List what there is of this, with every option, and exit.")  # fmt: skip
def convert_command(
    source: Path,
    output: Path,
    key_file: Path,
    training: TrainingOptions,
    name: str | None,
    validity: ValidityOptions,
    compression: CompressionOptions,
    variants: str | None,
) -> None:
    """Make a signed bundle from SOURCE, an ONNX file or a program that torch.export.save wrote (.pt2).

    \b
    archipel keys publisher
    archipel convert model.onnx -o model.bundle --key publisher
    archipel convert model.onnx -o model.bundle --key publisher --loss cross_entropy --lr 0.05 --trainable "head.*"
    archipel convert model.onnx -o model.bundle --key publisher --calibration images.npy
    archipel convert model.onnx -o model.bundle --key publisher --recipe recipe.toml --data train.npz
    archipel convert model.onnx -o model.bundle --key publisher --loss cross_entropy --lr 0.05 \\
        --strategy fedprox --strategy-option mu=0.1
    archipel convert model.onnx -o model --key publisher --variants float,int8,small --data train.npz

    A recipe compresses the model first, as `archipel compress` does; --calibration without one means int8. With a
    loss, devices train the float parameters of the compressed model, and the bundle rounds them anew after training.

    --variants makes several bundles, signed as one release, in the folder of --output: float; int8, which needs
    --calibration or --data; and small, from whose channels half of the FLOPs are removed before it is trained again on
    --data and rounded to int8 (--recipe replaces that). `archipel run` and `archipel slots install` take the best that
    fits the device.
    """
    key = load_private_key(key_file)
    if output.exists():
        raise CommandError(f"{output}: exists already; remove it or choose another name")
    if variants is None and not compression.compresses and any((*compression.files.values(), compression.work)):
        raise CommandError(
            "--data, --validation and --work are for compression; give --recipe, or --calibration for int8"
        )
    trained, signing = training.training(), validity.signing(key)
    with catch_ctrl_c(resume_hint(compression.work)) as check, progress_line() as show:
        # `convert` takes a batch size with a training only. Here the limits follow --batch-size without one, too.
        request = Request(source, output, signing, training=trained, name=name, batch_size=training.batch_size)
        on_progress = progress_callback(check, show)
        if variants is not None:
            made = make_release(request, read_variants(variants, compression, on_progress))
        else:
            bundle = make_bundle(replace(request, compression=_compression(compression, on_progress)))
    if variants is not None:
        click.echo(f"{output}: {release_text(made)}")
        return
    click.echo(_summary(bundle, output))


def _compression(options: CompressionOptions, on_progress: Callable[[Progress], None]) -> Compression | None:
    if not options.compresses:
        return None
    if options.recipe is None:
        note_default_recipe()
    parts = DEFAULT_RECIPE if options.recipe is None else load_recipe(options.recipe)
    # Which files are missing is known before any of them is read.
    check_sets(parts, options.files)
    return Compression(parts, **options.read_sets(), seed=options.seed, folder=options.work, on_progress=on_progress)


def _summary(bundle: Bundle, output: Path) -> str:
    manifest = bundle.manifest
    size = sum(path.stat().st_size for path in ([output] if output.is_file() else output.rglob("*")) if path.is_file())
    lines = [f"{output}: {manifest.name!r}, {size:,} bytes, digest {bundle.digest}"]
    metrics = manifest.lineage.metrics
    if "nbytes_before" in metrics:
        lines.append(f"predict: {metrics['nbytes_before']:,.0f} -> {metrics['nbytes_after']:,.0f} bytes")
    if "accuracy_before" in metrics:
        lines.append(f"accuracy: {100 * metrics['accuracy_before']:.2f} -> {100 * metrics['accuracy_after']:.2f} %")
    lines.append(f"programs {', '.join(sorted(manifest.programs))}; {len(manifest.parameters)} parameters")
    if "train" not in {program.kind for program in manifest.programs.values()}:
        lines.append("it predicts only; with --loss devices can train it")
    return "\n".join(lines)
