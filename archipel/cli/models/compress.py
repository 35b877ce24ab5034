"""`archipel compress`: make a model small by a recipe, or search for a recipe that meets a target."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
import typing
from pathlib import Path
from types import UnionType
from typing import Any

import click

from archipel.cli.input_output.option_group import option_group
from archipel.cli.input_output.progress_line import progress_line
from archipel.cli.input_output.publisher_keys import keys_for_bundles
from archipel.cli.input_output.sources import learned_weights, open_source
from archipel.cli.input_output.spelling import rule, spells_options
from archipel.cli.input_output.stopping import catch_ctrl_c
from archipel.cli.input_output.targets import check_target
from archipel.cli.models.option_groups import (
    DATA_RULES,
    DEFAULT_RECIPE,
    CompressionOptions,
    compression_options,
    note_default_recipe,
)
from archipel.cli.models.progress import progress_callback, progress_text, resume_hint
from archipel.compression import compress, load_recipe
from archipel.compression.recipe import PARTS, kind_of
from archipel.compression.search.point import part_text
from archipel.compression.search.search import TRIALS, SearchProgress, search
from archipel.compression.search.target import parse_target
from archipel.errors import CommandError
from archipel.graph import Model


def _list_parts(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(parts_text())
        ctx.exit()


RULES = [*DATA_RULES, rule(r"\b(batch_norm|dropout)='?(\w+)'?", r"\1 = \2 in the recipe")]
"""How errors are spelled: arguments as options, and those of parts as a recipe has them."""


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """The target of a search, None where there is no search, and how long it may take."""

    target: str | None
    trials: int
    minutes: float | None


@dataclasses.dataclass(frozen=True)
class ResultOptions:
    """What the command writes and prints beside the small model."""

    trainable: Path | None
    report_file: Path | None
    as_json: bool


search_options = option_group(
    "searching",
    SearchOptions,
    click.option("--target", help='Search for a recipe that meets this, such as "size<100kB, accuracy>=-0.5".'),
    click.option(
        "--trials", type=click.IntRange(1), default=TRIALS, show_default=True, help="How many recipes a search tries."
    ),
    click.option(
        "--minutes", type=click.FloatRange(0, min_open=True), help="A search begins no recipe after this many minutes."
    ),
)
result_options = option_group(
    "results",
    ResultOptions,
    click.option(
        "--trainable", type=click.Path(path_type=Path), help="Also write the graph with its float parameters here."
    ),
    click.option(
        "--report", "report_file", type=click.Path(path_type=Path), help="Write a page with tables and plots here."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object."),
)


@click.command("compress")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The small model, plain ONNX.")
@keys_for_bundles
@learned_weights
@compression_options
@search_options
@result_options
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_parts,
              help="List every part of a recipe with its fields, and exit.")  # fmt: skip
@spells_options(RULES)
def compress_command(
    model: Path,
    output: Path,
    key_files: tuple[Path, ...],
    weights: Path | None,
    compression: CompressionOptions,
    searching: SearchOptions,
    results: ResultOptions,
) -> None:
    """Make MODEL (an ONNX file from any tool) small, by a recipe or by a search for one.

    MODEL may also be a bundle, a model that `archipel fit --save` wrote or a slot: its float model is made small.

    \b
    archipel compress model.onnx -o small.onnx --calibration x.npy --validation test.npz
    archipel compress model.onnx -o small.onnx --recipe recipe.toml --data train.npz --validation val.npz --work run
    archipel compress model.onnx -o small.onnx --target "size<100kB, accuracy>=-0.5" --data train.npz \\
        --validation val.npz

    Without --recipe and --target the recipe is one part, static_int8. A target bounds size (B, kB, MB, KiB, MiB),
    accuracy (points against the original, or %), latency (us, ms, s) and flops (k, M, G); all but accuracy may also be
    % or x of the original. The --work folder (OUTPUT.search by default) keeps every recipe that was tried. If none
    meets the target, the command writes nothing and the exit code is 1.

    Ctrl-C stops at the next step; with --work the same command continues from there.
    """
    if searching.target is not None and compression.recipe is not None:
        raise CommandError("--recipe and --target: a search makes the recipe; give one of them")
    if searching.target is None and searching.minutes is not None:
        raise CommandError("--minutes is for a search; give --target")
    if searching.target is not None:
        # A wrong target is an error before the data are read, which may take long.
        parse_target(searching.target)
        if compression.validation is None:
            raise CommandError("--target needs --validation, labelled examples that accuracy is measured on")
    check_target(output)
    check_target(results.report_file)
    sets = compression.read_sets()
    with tempfile.TemporaryDirectory() as unpacked:
        source = open_source(model, key_files, weights, unpacked).model
    if searching.target is not None:
        folder = compression.work or output.with_name(output.name + ".search")
        _search(
            source, output, sets, folder, compression.seed, compression.engine, searching.target, searching, results
        )
        return
    parts = list(DEFAULT_RECIPE) if compression.recipe is None else load_recipe(compression.recipe)
    if compression.recipe is None:
        note_default_recipe()
    with catch_ctrl_c(resume_hint(compression.work)) as check, progress_line() as show:
        small, report = compress(
            source,
            parts,
            **sets,
            seed=compression.seed,
            engine=compression.engine,
            folder=compression.work,
            on_progress=progress_callback(check, show),
        )
    small.save(output)
    if results.trainable is not None:
        small.save(results.trainable, trainable=True)
    if results.report_file is not None:
        from archipel.compression.html import write_report

        write_report(report, results.report_file, f"{model.name}, compressed")
    if results.as_json:
        click.echo(json.dumps({"output": str(output), **report.to_dict()}, allow_nan=False, default=str))
        return
    click.echo(report)
    click.echo(f"written to {output}")


def _search(
    source: Model,
    output: Path,
    sets: dict[str, Any],
    folder: Path,
    seed: int,
    engine: str,
    target: str,
    searching: SearchOptions,
    results: ResultOptions,
) -> None:
    with catch_ctrl_c(resume_hint(folder)) as check, progress_line() as show:

        def on_progress(progress: SearchProgress) -> None:
            show(f"recipe {progress.trial}/{progress.trials}, {progress_text(progress.inner)}")
            check()

        result = search(source, target, **sets, folder=folder, trials=searching.trials, minutes=searching.minutes,
                        seed=seed, engine=engine, on_progress=on_progress)  # fmt: skip
    if results.report_file is not None:
        from archipel.compression.html import write_search_report

        write_search_report(result, results.report_file, f"{output.name}, searched")
    if results.as_json:
        click.echo(json.dumps({"output": str(output), **result.to_dict()}, allow_nan=False))
    else:
        click.echo(result)
    best, nearest = result.best, result.nearest
    if best is None:
        where = "" if nearest is None else f" ({nearest.folder}); {output} was not written"
        raise CommandError(result.verdict() + where)
    # Not written durably: the search's folder has the file, and the same command writes it again.
    output.write_bytes((best.folder / "model.onnx").read_bytes())
    if results.trainable is not None:
        results.trainable.write_bytes((best.folder / "trainable.onnx").read_bytes())
    if not results.as_json:
        click.echo(f"{result.verdict()}\nwritten to {output}; every point is in {folder / 'points'}")


def parts_text() -> str:
    """The text of --list: every part that a recipe can have, what it does, and its fields as a TOML file has them."""
    blocks = []
    for part in PARTS:
        fields = dataclasses.fields(part)
        hints = typing.get_type_hints(part)
        rows = [(field.name, _default(field), _allowed(hints[field.name])) for field in fields]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"    {name:<{widths[0]}}  {default:<{widths[1]}}  {allowed}" for name, default, allowed in rows]
        blocks.append("\n".join([kind_of(part), f"  {_meaning(part)}", *lines]))
    return "\n\n".join(blocks)


def _meaning(part: type[Any]) -> str:
    """The first sentence of the class's documentation."""
    # The end of a sentence is a full stop with a blank, except after "et al".
    text = " ".join((part.__doc__ or "").partition("\n\n")[0].split())
    return re.split(r"(?<!et al)\. ", text)[0].rstrip(".")


def _allowed(hint: Any) -> str:
    """A type as the file has it: `int`, `"l1" | "l2"`, `list of str`, `table (fine_tune)`."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(json.dumps, arguments))
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return " | ".join(_allowed(each) for each in arguments if each is not type(None))
    if typing.get_origin(hint) is tuple:
        return f"list of {_allowed(arguments[0])}"
    return f"table ({kind_of(hint)})" if isinstance(hint, type) and dataclasses.is_dataclass(hint) else hint.__name__


def _default(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING:
        if field.default_factory is dataclasses.MISSING:
            return "(needed)"
        default = field.default_factory()
    if dataclasses.is_dataclass(default):
        return part_text(default)  # type: ignore[arg-type]
    return "not set" if default is None else json.dumps(default)
