"""`archipel insight`: pages in the browser that show models and training runs."""

from __future__ import annotations

import dataclasses
import tempfile
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from archipel import __version__
from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.input_output.publisher_keys import keys_for_bundles
from archipel.cli.models.bundles import is_bundle, open_unverified, open_verified
from archipel.durable import write_durably
from archipel.errors import ArchipelError, CommandError

if TYPE_CHECKING:
    from archipel.insight import OpenSubject, Page, Run


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What the options say."""

    key_files: tuple[Path, ...]
    unverified: bool
    programs: tuple[str, ...]
    batch: int
    times: bool
    passes: int
    threads: int
    weights: tuple[Path, ...]
    examples: Path | None


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write one .html file that needs nothing else.")
@keys_for_bundles
@click.option("--unverified", is_flag=True, help="Show a bundle without verifying it; nothing of it is run then.")
@click.option("--program", "programs", multiple=True, metavar="NAME",
              help="Show this program of a bundle alone, and measure it.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True,
              help="What every symbolic dimension counts as, for sizes, memory and times.")  # fmt: skip
@click.option("--times/--no-times", default=True, show_default=True,
              help="Run the graph that predicts to measure it, and two models to compare their outputs.")  # fmt: skip
@click.option("--passes", type=click.IntRange(1, 1000), default=20, show_default=True, help="Passes to measure.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Threads for one operator.")
@click.option("--weights", type=click.Path(path_type=Path), multiple=True,
              help="Weights of later rounds (.safetensors, or a folder of them), for histograms.")  # fmt: skip
@click.option("--examples", type=click.Path(path_type=Path),
              help=".npy or .npz: histograms of what is computed from them; inputs of a comparison.")  # fmt: skip
@click.option("--browser/--no-browser", default=True, show_default=True, help="Open the browser.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The server's port. Default: any that is free.")
def insight(
    path: Path,
    other: Path | None,
    output: Path | None,
    key_files: tuple[Path, ...],
    unverified: bool,
    programs: tuple[str, ...],
    batch: int,
    times: bool,
    passes: int,
    threads: int,
    weights: tuple[Path, ...],
    examples: Path | None,
    browser: bool,
    port: int,
) -> None:
    """Show a model or a training run in the browser: graph, times, memory, weights, curves.

    \b
    archipel insight digits.bundle --key publisher.pub
    archipel insight model.onnx --batch 8 -o model.html
    archipel insight float.onnx int8.onnx --examples test.npz
    archipel insight runs/digits

    PATH is a bundle, an ONNX file, or the folder of a run: of `archipel train`, of `archipel simulate --folder`, of
    TensorBoard. Two models are compared. The page comes from a small server that this machine alone reaches, and a run
    that goes on is read again with every reload; Ctrl-C ends it. With -o the page is a file that works without network.
    """
    from archipel.graph import Model as _  # noqa: F401  (first: its error names the extra that is missing)
    from archipel.insight import PageServer, is_run, render  # isort: skip

    if output is not None and output.suffix != ".html":
        raise CommandError(f"{output}: expected a name that ends in .html")
    if unverified and key_files:
        raise CommandError("--unverified and --key: give one of the two")
    if path.suffix in (".csv", ".safetensors"):
        raise CommandError(f"{path}: a file of a run is shown with its folder, {path.parent}")
    asked = _Asked(key_files, unverified, programs, batch, times and not unverified, passes, threads, weights, examples)
    again: Callable[[], Page] | None = None
    if is_run(path):
        if other is not None or programs or weights:
            raise CommandError(f"{path}: a run is shown as a whole; leave out OTHER, --program and --weights")
        page, again = _run_page(path, asked)
    else:
        page = _model_page(path, other, asked)
    if output is not None:
        write_durably(output, render(page).encode(), 0o666)
        click.echo(f"written to {output}")
        return
    text = render(page)
    server = PageServer(lambda: text if again is None else render(again()), port)
    click.echo(f"{server.address} shows {page.title}; Ctrl-C ends it")
    if browser:
        webbrowser.open(server.address)
    server.run()


def _model_page(path: Path, other: Path | None, asked: _Asked) -> Page:
    from archipel.insight import Page, compare_subjects
    from archipel.insight.runs import in_order

    with tempfile.TemporaryDirectory(prefix="archipel-insight-") as folder:
        paths = [path] if other is None else [path, other]
        subjects = [_open(each, asked, folder) for each in paths]
        page = Page(title=", ".join(each.name for each in paths), version=__version__)
        page.subjects = [subject.subject for subject in subjects]
        examples = _read_examples(asked.examples, subjects[0])
        if other is not None:
            if asked.weights:
                raise CommandError("--weights: are for one model; leave them out, or leave out OTHER")
            page.comparison = compare_subjects(subjects[0], subjects[1], examples, asked.times)
        else:
            files = [
                file
                for each in asked.weights
                for file in (sorted(each.iterdir(), key=in_order) if each.is_dir() else [each])
            ]
            _add_histograms(page, subjects[0], [file for file in files if file.suffix == ".safetensors"], examples)
            if asked.weights and not page.histograms:
                raise CommandError(f"--weights {asked.weights[0]}: no weights there; expected .safetensors files")
        return page


def _run_page(path: Path, asked: _Asked) -> tuple[Page, Callable[[], Page]]:
    """The page of a run, and what makes it again with what the run has written since; its model is read once."""
    from archipel.insight import Page, Subject, activation_histograms, read_run, weight_histograms
    from archipel.insight.versions import read_versions

    first = read_run(path)
    signed = first.model is not None and is_bundle(first.model)
    if not signed and (asked.key_files or asked.unverified):
        raise CommandError(f"{path}: this run has nothing that is signed; leave out --key and --unverified")
    subjects: list[OpenSubject] = []
    title, untold = path.resolve().name, list[str]()

    def make() -> Page:
        run: Run = read_run(path)
        page = Page(title=title, version=__version__, curves=run.curves, histograms=run.histograms)
        page.notes = [*untold, *run.notes]
        page.subjects = [each.subject for each in subjects]
        if not subjects and run.facts:
            page.subjects = [Subject(name=title, kind="run", facts=run.facts)]
        versions = read_versions(run.weights, page.notes)
        page.histograms = [*weight_histograms(versions), *page.histograms]
        if examples is not None:
            graph, own = subjects[0].graphs[subjects[0].main], [("as it is", subjects[0].weights)]
            page.histograms += activation_histograms(graph, versions or own, examples)
        return page

    examples: Mapping[str, np.ndarray] | None = None
    if first.model is None:
        if asked.examples is not None:
            raise CommandError(
                f"--examples: {path} has no model that could compute with them; give one with the run's weights: "
                f"archipel insight MODEL --weights {path} --examples {asked.examples}"
            )
        return make(), make
    with tempfile.TemporaryDirectory(prefix="archipel-insight-") as folder:
        try:
            subjects.append(_open(first.model, asked, folder))
        except ArchipelError as error:
            # The run of somebody else: its curves are there without any key.
            if not signed or asked.key_files or asked.examples is not None:
                raise
            untold.append(f"the model is not shown: {error}")
            return make(), make
        subjects[0].subject.facts += first.facts
        examples = _read_examples(asked.examples, subjects[0])
        return make(), make


def _open(path: Path, asked: _Asked, folder: str) -> OpenSubject:
    from archipel.insight import measure_times, read_bundle, read_onnx

    if is_bundle(path):
        below = tempfile.mkdtemp(dir=folder)
        bundle = open_unverified(path, below) if asked.unverified else open_verified(path, asked.key_files, below)
        size = path.stat().st_size if path.is_file() else None
        subject = read_bundle(bundle, path.name, asked.batch, asked.programs, size)
    else:
        if asked.programs:
            raise CommandError(f"{path}: an ONNX file has one graph; leave out --program")
        subject = read_onnx(path, asked.batch)
    for graph in subject.graphs:
        if asked.times and (asked.programs or graph.data.kind in ("", "predict")):
            click.echo(f"measuring {graph.data.name} of {path.name}: {asked.passes} passes", err=True)
            measure_times(graph, asked.batch, asked.passes, asked.threads)
    return subject


def _read_examples(path: Path | None, subject: OpenSubject) -> Mapping[str, np.ndarray] | None:
    if path is None:
        return None
    arrays = read_arrays(path)
    if isinstance(arrays, np.ndarray):
        names = [graph_input.name for graph_input in subject.graphs[subject.main].model.inputs]
        if len(names) != 1:
            raise CommandError(f"{path}: one array, but the model has the inputs {', '.join(names)}; give an .npz")
        return {names[0]: arrays}
    return arrays


def _add_histograms(
    page: Page, subject: OpenSubject, files: list[Path], examples: Mapping[str, np.ndarray] | None
) -> None:
    from archipel.insight import activation_histograms, read_versions, weight_histograms

    versions = [("as it is", dict(subject.weights)), *read_versions(files, page.notes)]
    if files:
        page.histograms += weight_histograms(versions)
    if examples is not None:
        page.histograms += activation_histograms(subject.graphs[subject.main], versions, examples)
