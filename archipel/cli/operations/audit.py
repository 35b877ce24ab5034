"""`archipel audit`: read the audit log of a server, and check it."""

from __future__ import annotations

from pathlib import Path

import click

from archipel.bundle import load_public_key
from archipel.cli.input_output.remote import remote
from archipel.cli.input_output.tables import as_json, show, table
from archipel.durable import sync_folder, sync_open
from archipel.errors import CommandError, ProtocolError
from archipel.operator import OperatorClient
from archipel.protocol.moments import moment
from archipel.protocol.operator.access import AuditHead
from archipel.protocol.sealed import Sealed, decode, encode, unseal
from archipel.server.audit.chain import verify as verify_chain


@click.group()
def audit() -> None:
    """Read the audit log of a server, and check that nobody changed it.

    \b
    archipel audit list
    archipel audit verify --server-key server.key.pub --head audit.head

    Every entry holds the hash of the entry before. `verify` computes all hashes again and compares them with the heads
    that earlier runs kept in the file, so it also finds a log that was made anew from the beginning. The command needs
    the role auditor or admin.
    """


@audit.command("list")
@click.option("--limit", type=click.IntRange(min=1), help="Show only this many of the newest entries.")
@as_json
@remote
def list_(client: OperatorClient, limit: int | None, as_json: bool) -> None:
    """List every entry, oldest first.

    \b
    archipel audit list --limit 20
    """
    newest = 0 if limit is None else decode("audit head", client.audit.head().body, AuditHead).seq
    entries = list(client.audit.list(after=max(0, newest - (limit or 0))))
    rows = [
        (
            str(each.seq), moment(each.time / 1e6), each.actor, each.action, each.subject,
            " ".join(f"{name}={value}" for name, value in each.detail.items() if value not in ("", None)),
        )
        for each in entries
    ]  # fmt: skip
    show(entries, as_json, table(("no", "time", "actor", "action", "subject", "detail"), rows))


@audit.command()
@click.option("--server-key", type=click.Path(path_type=Path), required=True, help="The server's public key file.")
@click.option(
    "--head",
    "heads",
    type=click.Path(path_type=Path),
    help="File of the heads that earlier checks kept; the newest is added.",
)
@remote
def verify(client: OperatorClient, server_key: Path, heads: Path | None) -> None:
    """Check the whole log. Exit code 1 means that it was changed; the message says where.

    \b
    archipel audit verify --server-key server.key.pub --head audit.head

    With --head the command adds the log's newest entry to the file, for the next check.
    """
    key = load_public_key(server_key)
    kept_heads = _read_heads(heads, key) if heads and heads.exists() else []
    # The head comes before the entries: entries that are added meanwhile then only make the log longer than its head.
    sealed = client.audit.head()
    head_now = unseal("audit", sealed, key, AuditHead)
    # The head of an empty log has number 0 and says nothing about an entry.
    known = [(head.seq, head.hash) for head in (*kept_heads, head_now) if head.seq]
    seq, newest = verify_chain(client.audit.list(), heads=known)
    if heads is not None and head_now.seq and head_now.seq not in {head.seq for head in kept_heads}:
        # Only after the check: the file then has no head that contradicts its log.
        with open(heads, "ab") as file:
            file.write(encode(sealed) + b"\n")
            sync_open(file)
        sync_folder(heads.parent)
    click.echo(f"good: {seq} entries, {len(kept_heads)} kept heads, newest {newest}")


def _read_heads(file: Path, key: bytes) -> list[AuditHead]:
    """The heads in the file, each with the server's signature checked. Raises CommandError that names the line."""
    heads = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            heads.append(unseal("audit", decode("kept head", line, Sealed), key, AuditHead))
        except ProtocolError as error:
            raise CommandError(f"{file}, line {number}: expected a head that this server signed ({error})") from None
    return heads
