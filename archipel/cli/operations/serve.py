"""`archipel serve`: set up and run a federation server."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from archipel.bundle import load_public_key
from archipel.cli.input_output.enrolment_tokens import read_token
from archipel.cli.input_output.publisher_keys import allow_development, offer_option
from archipel.cli.input_output.tables import as_json, show, table
from archipel.durable import creating
from archipel.errors import CommandError
from archipel.protocol.messages import Name
from archipel.protocol.moments import moment
from archipel.protocol.sealed import encode
from archipel.server import init_data_folder, load_settings
from archipel.server.upstream_settings import Upstream

# What needs the database is imported by the commands that do: not by `start`, which leaves that to its children.


@click.group()
def serve() -> None:
    """Set up and run a federation server: `init` once, then `start`.

    \b
    archipel serve init federation --enrolment-key enrolment.pub --publisher-key publisher.pub \\
        --token-file operator.token
    archipel serve start federation --port 8470
    archipel serve backup federation backup-1
    archipel serve restore backup-1 federation-2
    """


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--enrolment-key", type=click.Path(path_type=Path), required=True, help="The public enrolment key (FILE.pub)."
)
@click.option(
    "--publisher-key",
    "publisher_keys",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Public key of a publisher whose bundles are accepted; may be given several times.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="New file (mode 0600) for the operator token. Default: print it.",
)
@click.option(
    "--tls-name",
    "tls_names",
    multiple=True,
    help="A DNS name or IP address of the server, for which a private authority of its own certifies it; may be given "
    "several times. Default: plain HTTP, for this machine or behind a proxy.",
)
@click.option(
    "--upstream-token",
    type=click.Path(path_type=Path),
    help="Make an edge server, which joins the server of this token (of `archipel token --aggregator`).",
)
@click.option(
    "--upstream-population", metavar="NAME", help="The population of this server that works for the upstream's tasks."
)
@click.option(
    "--upstream-cohort", type=click.IntRange(2, 4096), help="How many devices its rounds for the upstream take."
)
@allow_development
def init(
    folder: Path,
    enrolment_key: Path,
    publisher_keys: tuple[Path, ...],
    token_file: Path | None,
    tls_names: tuple[str, ...],
    upstream_token: Path | None,
    upstream_population: str | None,
    upstream_cohort: int | None,
    allow_development: bool,
) -> None:
    """Make a data folder with settings, the server's key, and the operator token, which is printed or written once.

    \b
    archipel serve init federation --enrolment-key enrolment.pub --publisher-key publisher.pub \\
        --token-file operator.token
    archipel serve init federation --enrolment-key enrolment.pub --publisher-key publisher.pub \\
        --token-file operator.token --tls-name fl.example.org
    archipel serve init edge --enrolment-key ward.pub --publisher-key publisher.pub --token-file edge-operator.token \\
        --upstream-token hospital.token --upstream-population patients --upstream-cohort 10

    With --upstream-token it is an edge server: it takes part in the rounds of another server with the sums of its own
    devices (docs/edge.md). The upstream need not be there yet.

    FOLDER is new or empty. The keys are public halves (FILE.pub of `archipel keys`); the private halves stay offline.
    """
    enrolment, publishers = load_public_key(enrolment_key), [load_public_key(file) for file in publisher_keys]
    above = _upstream(upstream_token, upstream_population, upstream_cohort)
    with offer_option(), ExitStack() as stack:
        # The file comes before the token: a token is shown once, and one that cannot be stored is lost.
        file = None if token_file is None else stack.enter_context(creating(token_file))
        token = init_data_folder(
            folder, enrolment_key=enrolment, publisher_keys=publishers, allow_development=allow_development,
            tls_names=tls_names, upstream=above,
        )  # fmt: skip
        if file is not None:
            file.write(token.encode() + b"\n")
    click.echo(f"data folder      {folder}")
    click.echo(f"server key       {folder / 'server.key.pub'}   (devices pin it: `archipel token --server-key`)")
    click.echo(f"operator token   {token_file or token}   ({'' if token_file else 'shown once; '}keep it safe)")
    if tls_names:
        click.echo(f"authority        {folder / 'tls/ca.pem'}   (devices: `archipel device init --ca`; commands: --ca)")


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--days", type=click.IntRange(1, 397), default=397, show_default=True, help="How long it is valid.")
def certificate(folder: Path, days: int) -> None:
    """Make a new TLS certificate by the private authority in FOLDER, for the same names, in place of the present one.

    \b
    archipel serve certificate federation

    A server that runs uses it for new connections. Devices trust the authority and notice nothing.
    """
    from archipel.server.authority import SERVER_FILE, certify

    end = certify(folder, days)
    click.echo(f"{folder / SERVER_FILE}: valid until {moment(end.timestamp())}")


def _upstream(token: Path | None, population: str | None, cohort: int | None) -> tuple[Upstream, bytes] | None:
    if token is None and population is None and cohort is None:
        return None
    if token is None or population is None or cohort is None:
        raise CommandError("an edge server needs --upstream-token, --upstream-population and --upstream-cohort")
    try:
        upstream = Upstream(population=msgspec.convert(population, Name), cohort=cohort)
    except msgspec.ValidationError:
        raise CommandError(f"--upstream-population: {population[:100]!r} is no name of a population") from None
    return upstream, encode(read_token(token))


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--host", help="Address to listen on. Default: from the settings, then 127.0.0.1.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port, 0 for a free one. Default: from the settings, then 8470."
)
@click.option(
    "--demo/--no-demo",
    default=None,
    help="Show the browser demo at /demo/ to anybody. Default: from the settings, then --no-demo.",
)
@click.option(
    "--docs/--no-docs",
    default=None,
    help="Show the documentation at /docs/ to anybody. Default: from the settings, then --no-docs.",
)
def start(folder: Path, **given: Any) -> None:
    """Serve until Ctrl-C or SIGTERM, with gunicorn and one coordinator; the supervisor restarts either if it dies.

    \b
    archipel serve start federation --host 0.0.0.0 --port 8470
    archipel serve start federation --demo --docs
    """
    from archipel.server import supervise

    overrides = {name: value for name, value in given.items() if value is not None}

    def announce(line: str) -> None:
        click.echo(line)
        click.echo(f"dashboard: {line.rsplit(' ', 1)[1]}/dashboard/")

    supervise(load_settings(folder, **overrides), announce=announce)


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
def migrate(folder: Path) -> None:
    """Bring the database up to date, check that files can be stored, and end; `start` does it by itself.

    \b
    archipel serve migrate federation

    For a platform that does this once before it starts several servers of a new version.
    """
    from archipel.server.services import Services

    services = Services.open(load_settings(folder), connections=1)
    try:
        services.prepare()
    finally:
        services.database.dispose()
    click.echo("the database has this version's schema, and files can be stored")


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("blobs")
def copy(folder: Path, blobs: str) -> None:
    """Copy a stopped server's bundles, weights and updates to BLOBS, a folder or s3://BUCKET/PREFIX, and verify them.

    \b
    archipel serve copy federation s3://bucket/federation

    A relative path starts in the working directory. After an interruption run the command again. The server uses the
    copy once its setting `blobs` names it.
    """
    from archipel.server import copy_files

    # A relative path in the settings would start in the data folder, not in the working directory.
    if "://" not in blobs:
        blobs = os.path.abspath(blobs)
    report = copy_files(load_settings(folder), blobs)
    click.echo(f"{report.files} files copied ({report.bytes} bytes), {report.there} were there; all have their digests")
    click.echo(f"the server uses them with the setting  blobs = {json.dumps(blobs)}")


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def backup(folder: Path, target: Path) -> None:
    """Copy everything that a server keeps to TARGET, a new folder, while it runs: database, files, settings, server
    key.

    \b
    archipel serve backup federation backup-1

    TARGET is relative to the working directory and must not be in FOLDER.

    \b
    PostgreSQL has its own tools for its databases. Dump the database first, then run this command:
        pg_dump --format=custom --file=archipel.dump DATABASE
    """
    from archipel.server import back_up

    report = back_up(load_settings(folder), target)
    click.echo(f"{target}: {report.files} files ({report.bytes} bytes), all have their digests")
    if not report.database:
        click.echo("the database is on PostgreSQL and not in it: pg_dump must have run before this")
    click.echo("it holds the server's private key: keep it as safe as the server")


@serve.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Delete nothing, and show what would be deleted.")
@click.option("--versions", type=click.IntRange(0), help="In place of the setting keep_versions.")
@click.option("--days", type=click.FloatRange(0), help="In place of the setting keep_days.")
@as_json
def prune(folder: Path, dry_run: bool, versions: int | None, days: float | None, as_json: bool) -> None:
    """Delete old versions' weights now, as the coordinator does every hour by the settings keep_versions and keep_days.

    \b
    archipel serve prune federation --dry-run
    archipel serve prune federation --dry-run --versions 10 --days 30      before one sets that
    archipel serve prune federation

    The server may run meanwhile. What is promoted, what a rollback can go back to, and what rollouts and tasks work
    with is never deleted. Files are removed a day after they were deleted.
    """
    from archipel.server import prune as prune_files

    given: dict[str, Any] = {"keep_versions": versions, "keep_days": days}
    settings = load_settings(folder, **{name: value for name, value in given.items() if value is not None})
    done = prune_files(settings, dry_run=dry_run)
    rows = [
        (each.kind, each.digest[:12], str(each.size), moment(each.created), ", ".join(each.of)) for each in done.files
    ]
    size, verb = sum(each.size for each in done.files), "would be deleted" if dry_run else "deleted"
    lines = table(("kind", "digest", "bytes", "stored", "of"), rows) if rows else []
    end = f"{len(rows)} files ({size} bytes) {verb}" + ("" if dry_run else f", {done.removed} removed from the disk")
    show(done, as_json, [*lines, end])


@serve.command()
@click.argument("backup", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def restore(backup: Path, folder: Path) -> None:
    """Make FOLDER, a new data folder, from a BACKUP; `archipel serve start FOLDER` then continues from there.

    \b
    archipel serve restore backup-1 federation-2
    """
    from archipel.server import restore as restore_backup

    report = restore_backup(backup, folder)
    click.echo(f"{folder}: {report.files} files ({report.bytes} bytes), all have their digests")
    if not report.database:
        click.echo("the backup has no database: pg_restore it, and set `database` to it")
    click.echo("a round that was under way may fail, and is tried again; keep the old server from starting")
