"""`archipel bundle`: list a server's bundles, send one, fetch one."""

from __future__ import annotations

from pathlib import Path

import click

from archipel.cli.input_output.remote import fields, remote, save
from archipel.cli.input_output.tables import as_json, show, table
from archipel.operator import OperatorClient
from archipel.protocol.moments import moment


@click.group()
def bundle() -> None:
    """List the bundles of a server, send one to it, and fetch one.

    `archipel task create` and `archipel model register` send a bundle, too; `archipel convert` makes one.

    \b
    archipel bundle list
    archipel bundle upload digits.bundle --population pupils
    archipel bundle download 9f86d081884c digits.bundle
    """


@bundle.command("list")
@click.option("--name", help="Show only bundles with this name.")
@as_json
@remote
def list_(client: OperatorClient, name: str | None, as_json: bool) -> None:
    """List the bundles that your token may read, newest first. The digest is `bundle` in a task's file.

    \b
    archipel bundle list --name digits
    """
    infos = [each for each in client.bundles.list() if name in (None, each.name)]
    rows = [(each.name, each.strategy, str(each.bytes), moment(each.published), each.digest) for each in infos]
    show(infos, as_json, table(("bundle", "strategy", "bytes", "published", "digest"), rows))


@bundle.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--population", help="The one that may use it; by default all that your token is for.")
@as_json
@remote
def upload(client: OperatorClient, file: Path, population: str | None, as_json: bool) -> None:
    """Send a bundle to the server, which checks who signed it. The same one again changes nothing.

    \b
    archipel bundle upload digits.bundle --population pupils
    """
    info = client.bundles.upload(file, population)
    show(info, as_json, fields(info, times=("published",)))


@bundle.command()
@click.argument("digest")
@click.argument("file", type=click.Path(path_type=Path))
@remote
def download(client: OperatorClient, digest: str, file: Path) -> None:
    """Write the bundle with DIGEST, or with a digest that alone begins so, into FILE, a new file.

    `archipel verify FILE --key PUBLISHER.pub` then checks who signed it.

    \b
    archipel bundle download 9f86d081884c digits.bundle
    """
    save(file, lambda: client.bundles.download(digest))
