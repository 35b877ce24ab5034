"""`archipel population`: list, release and revoke devices, and revoke enrolment tokens."""

from __future__ import annotations

from pathlib import Path

import click

from archipel.cli.input_output.enrolment_tokens import read_token
from archipel.cli.input_output.remote import remote
from archipel.cli.input_output.tables import as_json, show, table
from archipel.operator import OperatorClient
from archipel.protocol.moments import moment
from archipel.protocol.operator.devices import DeviceInfo, DeviceState, PopulationInfo


@click.group()
def population() -> None:
    """List the devices of a federation server, release them, and revoke devices or tokens.

    \b
    archipel population list
    archipel population devices pupils --state active
    archipel population release ID
    archipel population revoke-device ID
    archipel population revoke-token lost.token

    A revoked device never takes part again under its old enrolment; it needs a new enrolment token.
    """


@population.command("list")
@as_json
@remote
def list_(client: OperatorClient, as_json: bool) -> None:
    """List every population with its numbers of devices."""
    infos = list(client.populations.list())
    show(infos, as_json, table(("population", *_COUNTS), (_row(each) for each in infos)))


@population.command("show")
@click.argument("name")
@as_json
@remote
def show_(client: OperatorClient, name: str, as_json: bool) -> None:
    """Show one population: its numbers of devices, and a search for devices that spoil rounds.

    \b
    archipel population show pupils
    """
    info = client.populations.get(name)
    lines = [f"{label:<12}{value}" for label, value in zip(("population", *_COUNTS), _row(info))]
    show(info, as_json, [*lines, *_search(info)])


@population.command()
@click.argument("name", required=False)
@click.option("--state", type=click.Choice(["active", "set-aside", "revoked"]), help="Show only devices in this state.")
@as_json
@remote
def devices(client: OperatorClient, name: str | None, state: DeviceState | None, as_json: bool) -> None:
    """List the devices of the population NAME, or of all populations, newest first.

    \b
    archipel population devices pupils --state set-aside
    """
    infos = list(client.devices.list(population=name, state=state))
    if name is not None and not infos:
        client.populations.get(name)  # the list is empty for an unknown population, too; this raises for one
    rows = [
        (
            each.device_id, each.population, each.kind, _state(each), moment(each.enrolled), moment(each.last_seen),
            str(each.rounds), str(each.faults), str(each.rotations),
        )
        for each in infos
    ]  # fmt: skip
    head = ("device", "population", "kind", "state", "enrolled", "last seen", "rounds", "faults", "rotations")
    show(infos, as_json, table(head, rows))


@population.command("show-device")
@click.argument("device_id")
@as_json
@remote
def show_device(client: OperatorClient, device_id: str, as_json: bool) -> None:
    """Show one device: its state, its rounds, and what was counted against it.

    \b
    archipel population show-device ID
    """
    info = client.devices.get(device_id)
    show(info, as_json, _lines(info))


@population.command()
@click.argument("device_ids", metavar="ID...", nargs=-1, required=True)
@as_json
@remote
def release(client: OperatorClient, device_ids: tuple[str, ...], as_json: bool) -> None:
    """Let rounds take devices again that were set aside, and forget what was counted against them.

    \b
    archipel population release ID
    """
    released = [client.devices.release(device_id) for device_id in device_ids]
    show(released, as_json, (f"{each.device_id} {_state(each)}" for each in released))


@population.command("revoke-device")
@click.argument("device_ids", metavar="ID...", nargs=-1, required=True)
@as_json
@remote
def revoke_device(client: OperatorClient, device_ids: tuple[str, ...], as_json: bool) -> None:
    """Revoke devices for good. A round that they are in goes on without them.

    \b
    archipel population revoke-device ID
    """
    ended = [client.devices.revoke(device_id) for device_id in device_ids]
    show(ended, as_json, (f"{each.device_id} revoked {moment(each.revoked)}" for each in ended))


@population.command("revoke-token")
@click.argument("tokens", metavar="TOKEN...", nargs=-1, required=True)
@as_json
@remote
def revoke_token(client: OperatorClient, tokens: tuple[str, ...], as_json: bool) -> None:
    """Revoke enrolment tokens that nobody has used yet, so that nobody can enrol with them.

    \b
    archipel population revoke-token lost.token

    TOKEN is the token's file, of which only the certificate is sent, or its public key in 64 hexadecimal digits.
    """
    ended = []
    for token in tokens:
        # A file that is named like 64 hexadecimal digits can be given as ./NAME.
        key = _key_bytes(token)
        if key is not None:
            ended.append(client.enrolment_tokens.revoke(token_key=key))
        else:
            ended.append(client.enrolment_tokens.revoke(certificate=read_token(Path(token)).certificate))
    lines = (f"{each.token_id} revoked {moment(each.revoked)}" for each in ended)
    show(ended, as_json, lines)


@population.command("revoked-tokens")
@as_json
@remote
def revoked_tokens(client: OperatorClient, as_json: bool) -> None:
    """List the enrolment tokens that the server refuses, newest first.

    \b
    archipel population revoked-tokens
    """
    infos = list(client.enrolment_tokens.revoked())
    rows = [(each.token_id, each.token_key.hex(), each.population or "-", moment(each.revoked)) for each in infos]
    show(infos, as_json, table(("token", "public key", "population", "revoked"), rows))


_COUNTS = ("enrolled", "waiting", "in rounds", "set aside", "revoked", "live tasks")


def _row(info: PopulationInfo) -> tuple[str, ...]:
    counts = (
        info.enrolled, info.waiting, info.in_rounds, info.set_aside, info.revoked, info.live_tasks
    )  # fmt: skip
    return (info.name, *map(str, counts))


def _state(info: DeviceInfo) -> str:
    # The server knows `active` and `revoked`; being set aside is a quarantine of an active device.
    return "set aside" if info.state == "active" and info.quarantine is not None else info.state


def _search(info: PopulationInfo) -> list[str]:
    search = info.search
    if search is None:
        return []
    return [
        "",
        f"{search.spoiled} of the last {search.rounds} secure rounds were spoiled, the last one "
        f"{moment(search.last_spoiled)}, with {search.quiet} good ones since.",
        f"{search.suspects} devices were in spoiled rounds; `archipel population show-device ID` says how often.",
    ]


def _lines(info: DeviceInfo) -> list[str]:
    lines = [
        f"device      {info.device_id}",
        f"population  {info.population}",
        f"kind        {info.kind}",
        f"state       {_state(info)}",
        f"enrolled    {moment(info.enrolled)}",
        f"last seen   {moment(info.last_seen)}",
        f"revoked     {moment(info.revoked)}",
        f"rotations   {info.rotations}",
        f"rounds      {info.rounds}",
        f"faults      {info.faults}",
    ]
    aside, suspicion = info.quarantine, info.suspicion
    if aside is not None:
        lines.append(f"set aside   {moment(aside.since)} to {moment(aside.until)}, time number {aside.times}")
        lines.append(f"because     {aside.reason}: {aside.detail}")
        lines.append(f"since round {aside.round_id}")
    if suspicion is not None:
        explained = (
            f"by chance that happens in one of {suspicion.odds:.2g} searches at most"
            if suspicion.odds > 1
            else "no more than chance explains"
        )
        lines.append(f"suspicion   {suspicion.spoiled} of its last {suspicion.rounds} rounds were spoiled; {explained}")
    return lines


def _key_bytes(text: str) -> bytes | None:
    """The bytes of 64 hexadecimal digits, None for everything else."""
    try:
        return bytes.fromhex(text) if len(text) == 64 else None
    except ValueError:
        return None
