"""`archipel convert`: a model file becomes a signed bundle."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np

from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.input_output.card import card_option, read_card
from archipel.cli.input_output.progress_line import progress_line
from archipel.cli.input_output.publisher_keys import read_signing_key, signing_key
from archipel.cli.input_output.sources import has_bundle, learned_weights, open_source
from archipel.cli.input_output.spelling import spells_options
from archipel.cli.input_output.stopping import catch_ctrl_c
from archipel.cli.models.agreement import AgreementOptions, agreement_options
from archipel.cli.models.convert.analysis_options import AnalysisOptions, analysis_options
from archipel.cli.models.convert.lists import ALL, LISTS, list_text
from archipel.cli.models.convert.model_options import ModelOptions, model_options
from archipel.cli.models.convert.policy_options import PolicyOptions, policy_options
from archipel.cli.models.convert.result import bundle_result, release_notes, result_text
from archipel.cli.models.convert.spelling import RULES
from archipel.cli.models.convert.training_options import TrainingOptions, training_options
from archipel.cli.models.convert.validity_options import ValidityOptions, validity_options
from archipel.cli.models.convert.variants import read_variants, variants_option
from archipel.cli.models.option_groups import (
    DEFAULT_RECIPE,
    CompressionOptions,
    compression_options,
    note_default_recipe,
)
from archipel.cli.models.progress import progress_callback, resume_hint
from archipel.cli.models.releases import made_text, release_facts
from archipel.compression import Progress
from archipel.compression.recipe import check_sets, load_recipe
from archipel.converter import Compression, Signing
from archipel.converter.pipeline import make_bundle
from archipel.converter.request import Request
from archipel.converter.variants import make_release
from archipel.errors import CommandError, SignatureError
from archipel.graph import Model
from archipel.training.step_engines import ONNX_RUNTIME


def _list(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(list_text(value))
        ctx.exit()


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
              help="The bundle: a file if it ends in .bundle, else a folder; must not exist.")  # fmt: skip
@signing_key
@training_options
@model_options
@click.option("--name", help="The bundle's name. Default: the output's.")
@card_option
@validity_options
@policy_options
@analysis_options
@compression_options
@variants_option
@agreement_options
@click.option("--self-test", "self_test", type=click.Path(path_type=Path),
              help="Examples (.npz) by which devices check their answers; anybody who has the bundle can read them. "
              "Default: pseudo-random numbers.")  # fmt: skip
@learned_weights
@click.option("--source-key", "source_keys", type=click.Path(path_type=Path), multiple=True,
              help="The public key with which a bundle as SOURCE is verified. Default: that of --key.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what was made, and every note, as one JSON object.")
@click.option("--list", "what", type=click.Choice([*LISTS, ALL]), is_flag=False, flag_value=ALL, is_eager=True,
              expose_value=False, callback=_list,
              help="List what there is of this, with every option, and exit.")  # fmt: skip
@spells_options(RULES)
def convert_command(
    source: Path,
    output: Path,
    key_file: Path | None,
    training: TrainingOptions,
    model_settings: ModelOptions,
    name: str | None,
    card_file: Path | None,
    validity: ValidityOptions,
    policy: PolicyOptions,
    analysis: AnalysisOptions,
    compression: CompressionOptions,
    variants: str | None,
    agreement: AgreementOptions,
    self_test: Path | None,
    weights: Path | None,
    source_keys: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Make a signed bundle from SOURCE, an ONNX file or a program that torch.export.save wrote (.pt2).

    SOURCE may also be a bundle that trains (with --weights: after a task), a model that `archipel fit --save` wrote or
    a slot: the command goes on from what was learned, and names the bundle as the parent.

    \b
    archipel convert model.onnx -o model.bundle
    archipel keys publisher
    archipel convert model.onnx -o model.bundle --key publisher --loss cross_entropy --lr 0.05 --trainable "head.*"
    archipel convert model.onnx -o model.bundle --key publisher --calibration images.npy
    archipel convert model.onnx -o model.bundle --key publisher --recipe recipe.toml --data train.npz
    archipel convert model.onnx -o model.bundle --key publisher --loss cross_entropy --lr 0.05 \\
        --strategy fedprox --strategy-option mu=0.1
    archipel convert speech.onnx -o speech.bundle --key publisher --fix rate=16000 --fix state=0 --fix samples=512
    archipel convert model.onnx -o model --key publisher --variants float,int8,small --data train.npz

    A recipe compresses the model first, as `archipel compress` does; --calibration without one means int8. With a
    loss, devices train the float parameters of the compressed model, and the bundle rounds them anew after training.
    The command compares what the bundle predicts with what these float parameters answer, on the examples of
    --calibration and --validation, prints how far the two agree, and makes no bundle below --min-agreement or
    --min-snr.

    --variants makes several bundles, signed as one release, in the folder of --output: float; int8, which needs
    --calibration or --data; and small, from whose channels half of the FLOPs are removed before it is trained again on
    --data and rounded to int8 (--recipe replaces that). `archipel run` and `archipel slots install` take the best that
    fits the device.
    """
    key = read_signing_key(key_file)
    if output.exists():
        raise CommandError(f"{output}: exists already; remove it or choose another name")
    unused = *compression.files.values(), compression.work, compression.engine != ONNX_RUNTIME
    if variants is None and not compression.compresses and any(unused):
        raise CommandError(
            "--data, --validation, --work and --engine are for compression; give --recipe, or --calibration for int8"
        )
    trained, signing = training.training(), validity.signing(key)
    privacy, analysed = policy.privacy(), analysis.read()
    card = read_card(card_file)
    with (
        tempfile.TemporaryDirectory() as folder,
        catch_ctrl_c(resume_hint(compression.work)) as check,
        progress_line() as show,
    ):
        model, signing = _opened(source, source_keys, weights, folder, signing)
        model = model_settings.settle(model)
        # `convert` takes a batch size with a training only. Here the limits follow --batch-size without one, too.
        request = Request(
            model,
            output,
            signing,
            training=trained,
            analysis=analysed,
            name=name,
            min_agreement=agreement.min_agreement,
            min_snr=agreement.min_snr,
            privacy=privacy,
            self_test=None if self_test is None else _examples(self_test),
            card=card,
            batch_size=training.batch_size,
        )
        on_progress = progress_callback(check, show)
        if variants is not None:
            made = make_release(request, read_variants(variants, compression, on_progress))
            notes = release_notes(made)
            text = "\n".join([f"{output}: {made_text(made, folder)}", *(f"note: {note}" for note in notes)])
            summary = json.dumps({**release_facts(made), "notes": notes}, allow_nan=False) if as_json else text
        else:
            bundle = make_bundle(dataclasses.replace(request, compression=_compression(compression, on_progress)))
            facts = bundle_result(bundle, output)
            summary = json.dumps(facts, allow_nan=False) if as_json else result_text(facts)
    click.echo(summary)


def _compression(options: CompressionOptions, on_progress: Callable[[Progress], None]) -> Compression | None:
    if not options.compresses:
        return None
    if options.recipe is None:
        note_default_recipe()
    parts = DEFAULT_RECIPE if options.recipe is None else load_recipe(options.recipe)
    # Which files are missing is known before any of them is read.
    check_sets(parts, options.files)
    return Compression(
        parts, **options.read_sets(), seed=options.seed, engine=options.engine, folder=options.work,
        on_progress=on_progress,
    )  # fmt: skip


def _opened(
    source: Path, key_files: Sequence[Path], weights: Path | None, folder: str, signing: Signing
) -> tuple[Path | Model, Signing]:
    """What to convert: a model file as it is, or the model in a bundle, which becomes the parent of the new one."""
    if not has_bundle(source, weights):
        return source, signing
    own = [signing.key.public_key().public_bytes_raw()]
    try:
        model, bundle = open_source(source, key_files, weights, folder, own)
    except SignatureError as error:
        raise CommandError(f"{error}; give the key of the bundle's publisher, --source-key FILE.pub") from None
    parent = None if bundle is None else bundle.digest
    return model, dataclasses.replace(signing, parent=signing.parent or parent)


def _examples(file: Path) -> dict[str, np.ndarray]:
    arrays = read_arrays(file)
    if isinstance(arrays, np.ndarray):
        raise CommandError(f"--self-test {file}: one array; give an .npz with an entry for each input of the model")
    return arrays
