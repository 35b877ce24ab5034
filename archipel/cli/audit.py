"""`archipel audit`: read the audit log of a server, and check it."""

from __future__ import annotations

from pathlib import Path

import click

from archipel.bundle import load_public_key
from archipel.cli.remote import remote
from archipel.cli.tables import as_json, show, table
from archipel.durable import sync_folder, sync_open
from archipel.errors import CommandError, ProtocolError
from archipel.protocol.moments import moment
from archipel.protocol.operator.tasks import AuditHead
from archipel.protocol.sealed import Sealed, decode, encode, unseal
from archipel.server import OperatorClient
from archipel.server.audit.chain import verify as verify_chain


@click.group()
def audit() -> None:
    """Read the audit log of a server, and check that nothing in it was changed.

    \b
    archipel audit list
    archipel audit verify --server-key server.key.pub --head audit.head

    Every entry holds the hash of the one before. `verify` computes all of them again, and compares with the heads that
    it kept in the file: a log that was made anew from the beginning is found by them. Needs the role auditor or admin.
    """


@audit.command("list")
@click.option("--limit", type=click.IntRange(min=1), help="Only the newest so many.")
@as_json
@remote
def list_(client: OperatorClient, limit: int | None, as_json: bool) -> None:
    """Every entry, oldest first."""
    newest = 0 if limit is None else decode("audit head", client.audit_head().body, AuditHead).seq
    found = list(client.audit(after=max(0, newest - (limit or 0))))
    rows = [
        (
            str(each.seq), moment(each.time / 1e6), each.actor, each.action, each.subject,
            " ".join(f"{name}={value}" for name, value in each.detail.items() if value not in ("", None)),
        )
        for each in found
    ]  # fmt: skip
    show(found, as_json, table(("no", "time", "actor", "action", "subject", "detail"), rows))


@audit.command()
@click.option("--server-key", type=click.Path(path_type=Path), required=True, help="The server's public key file.")
@click.option("--head", "heads", type=click.Path(path_type=Path), help="File of the heads that were kept; added to.")
@remote
def verify(client: OperatorClient, server_key: Path, heads: Path | None) -> None:
    """Check the whole log; exit code 1 says what is wrong. With --head keep its newest entry for the next time."""
    key = load_public_key(server_key)
    kept = _read(heads, key) if heads and heads.exists() else []
    sealed = client.audit_head()
    told = unseal("audit", sealed, key, AuditHead)
    seq, newest = verify_chain(client.audit(), heads=[(head.seq, head.hash) for head in (*kept, told) if head.seq])
    if heads is not None and told.seq and told.seq not in {head.seq for head in kept}:
        with open(heads, "ab") as file:
            file.write(encode(sealed) + b"\n")
            sync_open(file)
        sync_folder(heads.parent)
    click.echo(f"good: {seq} entries, {len(kept)} kept heads, newest {newest}")


def _read(file: Path, key: bytes) -> list[AuditHead]:
    kept = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            kept.append(unseal("audit", decode("kept head", line, Sealed), key, AuditHead))
        except ProtocolError as error:
            raise CommandError(f"{file}, line {number}: no head that this server signed ({error})") from None
    return kept
