"""`archipel convert`: a model file becomes a signed bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from archipel.bundle import Bundle
from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.input_output.publisher_keys import read_signing_key, signing_key
from archipel.cli.input_output.spelling import spells_options
from archipel.cli.models.agreement import AgreementOptions, agreement_lines, agreement_options
from archipel.cli.models.analysis_options import AnalysisOptions, analysis_options
from archipel.cli.models.compression_options import (
    DEFAULT_RECIPE,
    CompressionOptions,
    compression_options,
    note_default_recipe,
)
from archipel.cli.models.convert_list import ALL, LISTS, list_text
from archipel.cli.models.convert_notes import made_by, note_lines
from archipel.cli.models.convert_spelling import RULES
from archipel.cli.models.inspect import program_facts
from archipel.cli.models.policy_options import PolicyOptions, policy_options
from archipel.cli.models.progress import catch_ctrl_c, progress_callback, progress_line, resume_hint
from archipel.cli.models.training_options import TrainingOptions, training_options
from archipel.cli.models.update_text import update_lines
from archipel.cli.models.validity_options import ValidityOptions, validity_options
from archipel.compression import Progress
from archipel.compression.recipe import check_sets, load_recipe
from archipel.converter import Compression
from archipel.converter.pipeline import make_bundle
from archipel.converter.request import Request
from archipel.errors import CommandError


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
@click.option("--name", help="The bundle's name. Default: the output's.")
@validity_options
@policy_options
@analysis_options
@compression_options
@agreement_options
@click.option("--self-test", "self_test", type=click.Path(path_type=Path),
              help="Examples (.npz) by which devices check their answers; anybody who has the bundle can read them. "
              "Default: pseudo-random numbers.")  # fmt: skip
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
    name: str | None,
    validity: ValidityOptions,
    policy: PolicyOptions,
    analysis: AnalysisOptions,
    compression: CompressionOptions,
    agreement: AgreementOptions,
    self_test: Path | None,
    as_json: bool,
) -> None:
    """Make a signed bundle from SOURCE, an ONNX file or a program that torch.export.save wrote (.pt2).

    \b
    archipel convert model.onnx -o model.bundle
    archipel keys publisher
    archipel convert model.onnx -o model.bundle --key publisher --loss cross_entropy --lr 0.05 --trainable "head.*"
    archipel convert model.onnx -o model.bundle --key publisher --calibration images.npy
    archipel convert model.onnx -o model.bundle --key publisher --recipe recipe.toml --data train.npz
    archipel convert model.onnx -o model.bundle --key publisher --loss cross_entropy --lr 0.05 \\
        --strategy fedprox --strategy-option mu=0.1

    A recipe compresses the model first, as `archipel compress` does; --calibration without one means int8. With a
    loss, devices train the float parameters of the compressed model, and the bundle rounds them anew after training.
    The command compares what the bundle predicts with what these float parameters answer, on the examples of
    --calibration and --validation, prints how far the two agree, and makes no bundle below --min-agreement or
    --min-snr.
    """
    key = read_signing_key(key_file)
    if output.exists():
        raise CommandError(f"{output}: exists already; remove it or choose another name")
    if not compression.compresses and any((*compression.files.values(), compression.work)):
        raise CommandError(
            "--data, --validation and --work are for compression; give --recipe, or --calibration for int8"
        )
    trained, signing = training.training(), validity.signing(key)
    privacy, analysed = policy.privacy(), analysis.read()
    with catch_ctrl_c(resume_hint(compression.work)) as check, progress_line() as show:
        # `convert` takes a batch size with a training only. Here the limits follow --batch-size without one, too.
        bundle = make_bundle(
            Request(
                source,
                output,
                signing,
                training=trained,
                analysis=analysed,
                compression=_compression(compression, progress_callback(check, show)),
                name=name,
                min_agreement=agreement.min_agreement,
                min_snr=agreement.min_snr,
                privacy=privacy,
                self_test=None if self_test is None else _examples(self_test),
                batch_size=training.batch_size,
            )
        )
    facts = _facts(bundle, output)
    click.echo(json.dumps(facts, allow_nan=False) if as_json else _text(facts))


def _compression(options: CompressionOptions, on_progress: Callable[[Progress], None]) -> Compression | None:
    if not options.compresses:
        return None
    if options.recipe is None:
        note_default_recipe()
    parts = DEFAULT_RECIPE if options.recipe is None else load_recipe(options.recipe)
    # Which files are missing is known before any of them is read.
    check_sets(parts, options.files)
    return Compression(parts, **options.read_sets(), seed=options.seed, folder=options.work, on_progress=on_progress)


def _examples(file: Path) -> dict[str, np.ndarray]:
    arrays = read_arrays(file)
    if isinstance(arrays, np.ndarray):
        raise CommandError(f"--self-test {file}: one array; give an .npz with an entry for each input of the model")
    return arrays


def _facts(bundle: Bundle, output: Path) -> dict[str, Any]:
    """What was made, as values for JSON."""
    manifest = bundle.manifest
    size = sum(path.stat().st_size for path in ([output] if output.is_file() else output.rglob("*")) if path.is_file())
    programs = {"programs": [program_facts(name, program, 0) for name, program in manifest.programs.items()]}
    limits = [line for line in update_lines(programs) if not line.startswith("hyperparameter")]
    return {
        "output": str(output),
        "name": manifest.name,
        "bytes": size,
        "digest": bundle.digest,
        "programs": sorted(manifest.programs),
        "trains": "train" in {program.kind for program in manifest.programs.values()},
        "parameters": len(manifest.parameters),
        "metrics": dict(manifest.lineage.metrics),
        "notes": [*note_lines(made_by(bundle)), *limits],
    }


def _text(facts: Mapping[str, Any]) -> str:
    metrics = facts["metrics"]
    lines = [f"{facts['output']}: {facts['name']!r}, {facts['bytes']:,} bytes, digest {facts['digest']}"]
    if "nbytes_before" in metrics:
        lines.append(f"predict: {metrics['nbytes_before']:,.0f} -> {metrics['nbytes_after']:,.0f} bytes")
    if "accuracy_before" in metrics:
        lines.append(f"accuracy: {100 * metrics['accuracy_before']:.2f} -> {100 * metrics['accuracy_after']:.2f} %")
    lines += agreement_lines(metrics)
    lines.append(f"programs {', '.join(facts['programs'])}; {facts['parameters']} parameters")
    if not facts["trains"]:
        lines.append("it predicts only; with --loss devices can train it")
    return "\n".join([*lines, *(f"note: {note}" for note in facts["notes"])])
