"""`archipel insight`: pages in the browser that show a model or a training run."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from archipel import __version__
from archipel.cli.input_output.publisher_keys import keys_for_bundles
from archipel.cli.models.bundles import is_bundle, open_unverified, open_verified
from archipel.durable import write_durably
from archipel.errors import CommandError

if TYPE_CHECKING:
    from archipel.insight import OpenSubject, Page


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write one .html file that needs nothing else.")
@keys_for_bundles
@click.option("--unverified", is_flag=True, help="Show a bundle without verifying it; nothing of it is run then.")
@click.option(
    "--program", "programs", multiple=True, metavar="NAME", help="Show this program of a bundle alone, and measure it."
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True,
              help="What every symbolic dimension counts as, for sizes, memory and times.")  # fmt: skip
@click.option("--times/--no-times", default=True, show_default=True, help="Run the graph to measure its operators.")
@click.option("--passes", type=click.IntRange(1, 1000), default=20, show_default=True, help="Passes to measure.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Threads for one operator.")
@click.option("--browser/--no-browser", default=True, show_default=True, help="Open the browser.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The server's port. Default: any that is free.")
def insight(
    path: Path,
    output: Path | None,
    key_files: tuple[Path, ...],
    unverified: bool,
    programs: tuple[str, ...],
    batch: int,
    times: bool,
    passes: int,
    threads: int,
    browser: bool,
    port: int,
) -> None:
    """Show a model in the browser: graph, times, memory, weights.

    \b
    archipel insight digits.bundle --key publisher.pub
    archipel insight model.onnx --batch 8 -o model.html

    PATH is a bundle or an ONNX file. The page comes from a small server that this machine alone reaches; Ctrl-C ends
    it. With -o the page is a file that works without network.
    """
    from archipel.graph import Model as _  # noqa: F401  (first: its error names the extra that is missing)
    from archipel.insight import PageServer, measure_times, render  # isort: skip

    if output is not None and output.suffix != ".html":
        raise CommandError(f"{output}: expected a name that ends in .html")
    with tempfile.TemporaryDirectory(prefix="archipel-insight-") as folder:
        subject = _open(path, key_files, unverified, programs, batch, folder)
        if times and not unverified:
            for graph in subject.graphs:
                if programs or graph.data.kind in ("", "predict"):
                    click.echo(f"measuring {graph.data.name}: {passes} passes", err=True)
                    measure_times(graph, batch, passes, threads)
        page = _page(subject)
    if output is not None:
        write_durably(output, render(page).encode(), 0o666)
        click.echo(f"written to {output}")
        return
    text = render(page)
    server = PageServer(lambda: text, port)
    click.echo(f"{server.address} shows {page.title}; Ctrl-C ends it")
    if browser:
        webbrowser.open(server.address)
    server.run()


def _open(
    path: Path, key_files: tuple[Path, ...], unverified: bool, programs: tuple[str, ...], batch: int, folder: str
) -> OpenSubject:
    from archipel.insight import read_bundle, read_onnx

    if not is_bundle(path):
        if key_files or unverified or programs:
            raise CommandError(f"{path}: an ONNX file has no signature; leave out --key, --unverified and --program")
        return read_onnx(path, batch)
    if unverified and key_files:
        raise CommandError("--unverified and --key: give one of the two")
    bundle = open_unverified(path, folder) if unverified else open_verified(path, key_files, folder)
    size = path.stat().st_size if path.is_file() else None
    return read_bundle(bundle, path.name, batch, programs, size)


def _page(subject: OpenSubject) -> Page:
    from archipel.insight import Page

    return Page(title=subject.subject.name, version=__version__, subjects=[subject.subject])
