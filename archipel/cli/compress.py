"""`archipel compress`: make a model small by a recipe, or search for a recipe that meets a target."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, UnionType
from typing import Any

import click

from archipel.cli.arrays import read_arrays
from archipel.compression import Progress, StaticInt8, compress, load_recipe
from archipel.compression.part import Part
from archipel.compression.recipe import PARTS, kind_of
from archipel.compression.search.point import part_text
from archipel.compression.search.search import TRIALS, SearchProgress, search
from archipel.compression.search.target import parse_target
from archipel.errors import CommandError
from archipel.graph import Model

DEFAULT_RECIPE: tuple[Part, ...] = (StaticInt8(),)


def _list_parts(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(parts_text())
        ctx.exit()


DATA_OPTIONS = (
    click.option("--data", type=click.Path(path_type=Path),
                 help='Training data: an .npz with an entry for each input of the model and "label".'),
    click.option("--calibration", type=click.Path(path_type=Path),
                 help="Examples (.npz or .npy, labels optional) for the ranges of activations. Default: --data."),
    click.option("--validation", type=click.Path(path_type=Path), help="Labelled .npz on which accuracy is measured."),
    click.option("--recipe", type=click.Path(path_type=Path), help="A recipe in TOML; --list shows what it may have."),
    click.option("--work", type=click.Path(path_type=Path),
                 help="A folder for progress; after an interruption the same command continues from it."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of every random choice."),
)  # fmt: skip


def data_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that compress."""
    for option in reversed(DATA_OPTIONS):
        function = option(function)
    return function


@click.command("compress")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The small model, plain ONNX.")
@data_options
@click.option("--target", help='Search for a recipe that meets this, such as "size<100kB, accuracy>=-0.5".')
@click.option(
    "--trials", type=click.IntRange(1), default=TRIALS, show_default=True, help="How many recipes a search tries."
)
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), help="A search begins no recipe after this many minutes."
)
@click.option(
    "--trainable", type=click.Path(path_type=Path), help="Also write the graph with its float parameters here."
)
@click.option(
    "--report", "report_file", type=click.Path(path_type=Path), help="Write a page with tables and plots here."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_parts,
              help="List every part of a recipe with its fields, and exit.")  # fmt: skip
def compress_command(
    model: Path,
    output: Path,
    data: Path | None,
    calibration: Path | None,
    validation: Path | None,
    recipe: Path | None,
    work: Path | None,
    seed: int,
    target: str | None,
    trials: int,
    minutes: float | None,
    trainable: Path | None,
    report_file: Path | None,
    as_json: bool,
) -> None:
    """Make MODEL (an ONNX file from any tool) small, by a recipe or by a search for one.

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
    if target is not None and recipe is not None:
        raise CommandError("--recipe and --target: a search makes the recipe; give one of them")
    if target is None and minutes is not None:
        raise CommandError("--minutes is for a search; give --target")
    if target is not None:
        # Before the data are read.
        parse_target(target)
        if validation is None:
            raise CommandError("--target needs --validation, labelled examples that accuracy is measured on")
    sets = read_sets(data, calibration, validation)
    source = Model.from_onnx(model)
    if target is not None:
        folder = work or output.with_name(output.name + ".search")
        _search(source, output, sets, target, folder, seed, trials, minutes, trainable, report_file, as_json)
        return
    parts = list(DEFAULT_RECIPE) if recipe is None else load_recipe(recipe)
    if recipe is None:
        click.echo("no --recipe: static_int8 with its defaults", err=True)
    with stoppable(how_to_go_on(work)) as check, progress_line() as show:
        small, report = compress(source, parts, **sets, seed=seed, folder=work, on_progress=told(check, show))
    small.save(output)
    if trainable is not None:
        small.save(trainable, trainable=True)
    if report_file is not None:
        from archipel.compression.html import write_report

        write_report(report, report_file, f"{model.name}, compressed")
    if as_json:
        click.echo(json.dumps({"output": str(output), **report.to_dict()}, allow_nan=False, default=str))
        return
    click.echo(report)
    click.echo(f"written to {output}")


def _search(
    source: Model,
    output: Path,
    sets: dict[str, Any],
    target: str,
    folder: Path,
    seed: int,
    trials: int,
    minutes: float | None,
    trainable: Path | None,
    report_file: Path | None,
    as_json: bool,
) -> None:
    with stoppable(how_to_go_on(folder)) as check, progress_line() as show:

        def on_progress(progress: SearchProgress) -> None:
            show(f"recipe {progress.trial}/{progress.trials}, {_text(progress.inner)}")
            check()

        result = search(source, target, **sets, folder=folder, trials=trials, minutes=minutes, seed=seed,
                        on_progress=on_progress)  # fmt: skip
    if report_file is not None:
        from archipel.compression.html import write_search_report

        write_search_report(result, report_file, f"{output.name}, searched")
    if as_json:
        click.echo(json.dumps({"output": str(output), **result.to_dict()}, allow_nan=False))
    else:
        click.echo(result)
    best, nearest = result.best, result.nearest
    if best is None:
        where = "" if nearest is None else f" ({nearest.folder}); {output} was not written"
        raise CommandError(result.verdict() + where)
    output.write_bytes((best.folder / "model.onnx").read_bytes())
    if trainable is not None:
        trainable.write_bytes((best.folder / "trainable.onnx").read_bytes())
    if not as_json:
        click.echo(f"{result.verdict()}\nwritten to {output}; every point is in {folder / 'points'}")


def read_sets(data: Path | None, calibration: Path | None, validation: Path | None) -> dict[str, Any]:
    """The arrays of the files by what they are for. Raises CommandError, OSError."""
    files = {"data": data, "calibration": calibration, "validation": validation}
    return {what: None if path is None else read_arrays(path) for what, path in files.items()}


def how_to_go_on(folder: Path | None) -> str:
    if folder is None:
        return "nothing was kept; with --work FOLDER an interrupted run can go on"
    return f"what is done is in {folder}; run the same command again to go on from it"


@contextmanager
def stoppable(hint: str) -> Iterator[Callable[[], None]]:
    """Ctrl-C ends the block at its next call of what this gives; a second one at once. Prints the hint, aborts."""
    before = signal.getsignal(signal.SIGINT)
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    except KeyboardInterrupt:
        click.echo(f"\n{hint}", err=True)
        raise click.Abort from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on stderr that is written anew ten times a second; none where stderr is no terminal."""
    shown = 0.0

    def show(text: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if sys.stderr.isatty() and now - shown >= 0.1:
            shown = now
            click.echo(f"\r{text[:76]:<76}", nl=False, err=True)

    yield show
    if shown:
        click.echo(f"\r{'':<76}\r", nl=False, err=True)


def told(check: Callable[[], None], show: Callable[[str], None]) -> Callable[[Progress], None]:
    """What `compress` tells its progress to."""

    def on_progress(progress: Progress) -> None:
        show(_text(progress))
        check()

    return on_progress


def _text(progress: Progress) -> str:
    return f"part {progress.part}/{progress.parts}, {progress.what}, {progress.done}/{progress.total}"


def parts_text() -> str:
    """Every part of a recipe as it is written in a file: its first line of documentation, its fields and defaults."""
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
