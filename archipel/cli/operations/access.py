"""`archipel access`: access tokens of people and scripts."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from archipel.cli.input_output.remote import remote
from archipel.cli.input_output.tables import as_json, show, table
from archipel.durable import creating
from archipel.errors import CommandError
from archipel.operator import OperatorClient
from archipel.protocol.moments import moment
from archipel.protocol.operator.access import TokenRequest


@click.group()
def access() -> None:
    """Make and revoke the access tokens with which people and scripts use a server.

    \b
    archipel access create night-shift --role operator --population pupils --days 30 -o token
    archipel access list
    archipel access revoke ID

    Operators have models trained. Analysts ask devices questions (evaluations and analyses). Auditors read everything
    and change nothing. Admins may do all of this and make tokens. Only an admin can use this command. Devices enrol
    with tokens of another kind: `archipel token`.
    """


@access.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["operator", "analyst", "auditor", "admin"]), required=True)
@click.option(
    "--population", "populations", multiple=True, help="Bind the token to this population; may be given several times."
)
@click.option(
    "--days",
    type=click.FloatRange(0, 36500, min_open=True),
    help="How many days the token is valid. Default: without end.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="New file for the token, mode 0600."
)
@as_json
@remote
def create(
    client: OperatorClient,
    name: str,
    role: str,
    populations: tuple[str, ...],
    days: float | None,
    output: Path,
    as_json: bool,
) -> None:
    """Make a token for NAME and write it into a file. Nothing shows it again.

    \b
    archipel access create night-shift --role operator --population pupils --days 30 -o token
    """
    try:
        request = msgspec.convert(
            {
                "name": name,
                "role": role,
                "populations": list(populations) or None,
                "seconds": None if days is None else days * 86400,
            },
            TokenRequest,
        )
    except msgspec.ValidationError as error:
        raise CommandError(str(error)) from None
    # The file comes before the token: the server shows a token once, and one that cannot be stored is lost.
    with creating(output) as file:
        created = client.tokens.create(request)
        file.write(created.token.encode() + b"\n")
    show(created.info, as_json, [f"token {created.info.token_id} ({role}) written to {output}"])


@access.command("list")
@as_json
@remote
def list_(client: OperatorClient, as_json: bool) -> None:
    """List every token and what it is for, newest first."""
    infos = list(client.tokens.list())
    rows = [
        (
            each.token_id, each.name, each.role, "all" if each.populations is None else ", ".join(each.populations),
            moment(each.created), moment(each.expires), moment(each.revoked),
        )
        for each in infos
    ]  # fmt: skip
    show(infos, as_json, table(("token", "name", "role", "populations", "created", "expires", "revoked"), rows))


@access.command()
@click.argument("token_id")
@remote
def revoke(client: OperatorClient, token_id: str) -> None:
    """Revoke a token: the server refuses it from now on.

    \b
    archipel access revoke ID
    """
    click.echo(f"{token_id} revoked {moment(client.tokens.revoke(token_id).revoked)}")
