"""`archipel models push` and `pull`: a model's versions in a server's registry, and the one that fits a device."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from archipel.bundle import Bundle, open_bundle
from archipel.cli.input_output.publisher_keys import remedy_of, trusted_keys
from archipel.cli.input_output.remote import remote, save
from archipel.cli.models.ranking import figures, rank
from archipel.errors import CommandError
from archipel.lite_runtime.choice import measure_latency
from archipel.operator import OperatorClient
from archipel.protocol.operator.registry import VersionRequest

_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "KiB": 1024.0, "MiB": 1048576.0}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@click.command()
@click.argument("name")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--population", required=True, help="The population whose devices run the model.")
@remote
def push(client: OperatorClient, name: str, files: tuple[Path, ...], population: str) -> None:
    """Register bundles in FILES as versions of the model NAME, in this order. The model is made if there is none.

    \b
    archipel models push digits digits.bundle digits-int8.bundle --population pupils
    """
    client.models.create(name, population)
    for file in files:
        digest = client.bundles.upload(file, population).digest
        info = client.models.register(name, VersionRequest(bundle=digest, task_id=None, task_version=None, parent=None))
        click.echo(f"{file}: version {info.number} of {name}")


@click.command()
@click.argument("name")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The bundle, a new file.")
@click.option("--key", "key_files", type=click.Path(path_type=Path), multiple=True,
              help="The publisher's public key. Default: your development key.")  # fmt: skip
@click.option("--max-size", metavar="SIZE", help="Largest file, such as 300kB.")
@click.option("--max-latency", metavar="TIME", help="Longest prediction of one example, such as 5ms, measured here.")
@click.option("--newest", is_flag=True, help="Take the newest version that fits, whatever its accuracy.")
@remote
def pull(
    client: OperatorClient,
    name: str,
    output: Path,
    key_files: tuple[Path, ...],
    max_size: str | None,
    max_latency: str | None,
    newest: bool,
) -> None:
    """Write the version of the model NAME that fits and is the most accurate into OUTPUT, its signature checked.

    Accuracy is what the versions' model cards say; of equal ones the newest is taken. Versions that were rejected are
    left out, and those that are weights which rounds made (`archipel model download` writes them). A size is that of
    the file; a prediction is timed with one thread.

    \b
    archipel models pull digits -o digits.bundle --key publisher.pub --max-size 300kB --max-latency 5ms
    """
    most_bytes = None if max_size is None else _bound("--max-size", max_size, _SIZES)
    most_seconds = None if max_latency is None else _bound("--max-latency", max_latency, _TIMES)
    keys = trusted_keys(output, key_files)
    if output.exists():
        raise CommandError(f"{output}: exists already; choose another name")
    passed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="archipel-pull-") as work, remedy_of(key_files):
        opened = _open_versions(client, name, most_bytes, keys, Path(work), passed)
        # Opened as they are reached: for the newest one nothing older is downloaded than needed.
        candidates = ((version, "the newest that fits") for version in opened) if newest else _by_accuracy(list(opened))
        for version, why in candidates:
            taken = None if most_seconds is None else measure_latency(version.bundle)
            if most_seconds is not None and taken is not None and taken > most_seconds:
                passed.append(f"version {version.number} takes {1e3 * taken:.3g} ms")
                continue
            save(output, version.file.read_bytes)
            click.echo(f"version {version.number} of {name}: {'; '.join([why, *passed])}")
            return
    raise CommandError(f"{name}: no version fits: {'; '.join(passed) or 'it has none that is a bundle'}")


class _Version(NamedTuple):
    number: int
    file: Path
    bundle: Bundle


def _open_versions(
    client: OperatorClient, name: str, most_bytes: float | None, keys: list[bytes], work: Path, passed: list[str]
) -> Iterator[_Version]:
    """The versions that may be taken and are small enough, the newest first, each downloaded and verified.

    What is too large is added to `passed`.
    """
    for version in client.models.versions(name):
        if version.weights is not None or version.state == "rejected":
            continue
        size = client.bundles.pieces(version.bundle).size
        if most_bytes is not None and size > most_bytes:
            passed.append(f"version {version.number} has {size:,} bytes")
            continue
        file = work / f"{version.number}.bundle"
        file.write_bytes(client.bundles.download(version.bundle))
        bundle = open_bundle(file, keys, work / "cache", allow_development=True)
        if bundle.digest != version.bundle:
            raise CommandError(f"version {version.number}: the server sent another bundle than it names")
        yield _Version(version.number, file, bundle)


def _by_accuracy(versions: list[_Version]) -> Iterator[tuple[_Version, str]]:
    stated = [(each.number, figures(each.bundle.card, each.bundle.manifest.lineage.metrics)) for each in versions]
    known = {each.number: each for each in versions}
    for place, each in enumerate(rank(stated)):
        best = "" if place or len(versions) == 1 else "most accurate of those small enough, "
        yield known[each.number], f"{best}{each.why}"


def _bound(option: str, text: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise CommandError(f"{option} {text}: expected a number above 0 with a unit of {', '.join(units)}")
    return float(match[1]) * units[match[2]]
