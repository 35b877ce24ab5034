"""`archipel round`: who took part in a task's rounds, and the results."""

from __future__ import annotations

from itertools import pairwise

import click

from archipel.cli.input_output.distributions import describe_distribution
from archipel.cli.input_output.remote import remote, result_line
from archipel.cli.input_output.tables import as_json, show, table
from archipel.operator import OperatorClient
from archipel.protocol.moments import moment
from archipel.protocol.operator.advice import advise_on_failure, advise_on_refusals
from archipel.protocol.operator.results import Distribution, RoundResult
from archipel.protocol.operator.tasks import RoundInfo


@click.group()
def round() -> None:
    """Show the rounds of a federation server's tasks: who took part, and the results.

    \b
    archipel round list TASK     every round of a task
    archipel round show ROUND    its devices, and the result of an evaluation or analysis
    """


@round.command("list")
@click.argument("task_id")
@as_json
@remote
def list_(client: OperatorClient, task_id: str, as_json: bool) -> None:
    """List the rounds of a task, oldest first: who took part, and why failed rounds failed.

    \b
    archipel round list TASK

    `devices` counts those that began in the round, `in the sum` the updates in its result. In a task that is
    asynchronous and plain these may come from other devices: an update comes into the round that is open when it
    arrives. Of a task with secure groups each group is a round; groups of one round have one number, and the version
    is in the first of those that count.
    """
    infos = list(client.tasks.rounds(task_id))
    rows = [
        (
            each.round_id, str(each.number), each.phase, str(len(each.participants)), str(len(each.survivors)),
            moment(each.started), each.reason or result_line(each.result),
        )
        for each in infos
    ]  # fmt: skip
    show(infos, as_json, table(("round", "number", "phase", "devices", "in the sum", "started", ""), rows))


@round.command("show")
@click.argument("round_id")
@as_json
@remote
def show_(client: OperatorClient, round_id: str, as_json: bool) -> None:
    """Show one round: its result, and for each device the last phase that it answered in, or that it left.

    \b
    archipel round show ROUND
    """
    info = client.rounds.get(round_id)
    show(info, as_json, [*_head(info), *_advice(info), "", *_devices(info), *_notes(info), *_result(info.result)])


def _head(info: RoundInfo) -> list[str]:
    rows = {
        "round": info.round_id,
        "task": info.task_id,
        "number": str(info.number),
        **({} if info.part_of is None else {"group of": info.part_of}),
        "phase": info.phase + (f": {info.reason}" if info.reason else ""),
        **(
            {"spoiled": "by one of its devices or several, which cannot be seen from one round"} if info.spoiled else {}
        ),
        "refused": ", ".join(f"{why} {count}" for why, count in info.refused.items()) or "-",
        "deadlines": ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in info.deadlines.items()) or "the task's",
        "started": moment(info.started),
        "ended": moment(info.ended),
        "weights in": info.weights_in,
        "weights out": info.weights_out or "-",
        "step": "-" if info.step_norm is None else f"{info.step_norm:.4g}",
    }
    return [f"{name:<12}{value}" for name, value in rows.items()]


def _advice(info: RoundInfo) -> list[str]:
    """What to do, where the round failed or devices refused it."""
    failure = advise_on_failure(info.reason) if info.phase == "failed" else ""
    told = [f"{reason}: {text}" for reason, text in advise_on_refusals(info.refused).items()]
    lines = [*([failure] if failure else []), *told]
    return ["", *(f"what to do  {line}" for line in lines)] if lines else []


def _devices(info: RoundInfo) -> list[str]:
    counted = set(info.survivors)
    rows: list[tuple[str, str, str, str]] = [
        (
            each.device_id,
            "left" if each.left else each.furthest,
            str(each.bytes_uploaded),
            "yes" if each.device_id in counted else "",
        )
        for each in info.participants
    ]
    # In an asynchronous task a device may begin in one round, and its update come into the sum of a later one.
    began = {each.device_id for each in info.participants}
    rows += [(device, "began earlier", "", "yes") for device in info.survivors if device not in began]
    return table(("device", "furthest", "bytes", "in the sum"), rows)


def _notes(info: RoundInfo) -> list[str]:
    """Lines about faults of devices, devices set aside for them, and a search for devices that spoil rounds."""
    lines = [f"{each.device_id}: {each.reason}" for each in info.faults]
    lines += [f"{device} was set aside" for device in info.set_aside]
    if info.suspects:
        lines.append(f"drawn with few of the {info.suspects} suspects that waited, to find out who spoils rounds")
    return ["", *lines] if lines else []


def _result(result: RoundResult | None) -> list[str]:
    if result is None:
        return []
    lines = ["", f"of {result.devices} devices" + (f", {result.examples:.6g} examples" if result.examples else "")]
    for name, value in result.metrics.items():
        beyond = result.clamped.get(name, 0.0)
        note = f"   beyond its range on devices with {beyond:.1%} of the examples, which count as the bound"
        lines.append(f"{name:<24}{value:.6g}{note if beyond else ''}")
    for name, spread in result.distributions.items():
        lines += _bars(f"{name} over the devices: {describe_distribution(spread)}", *_counted(spread))
    if result.clipped is not None:
        lines.append(f"{'clipped':<24}{result.clipped} of {result.devices} devices had their update clipped")
    if result.capped is not None:
        lines.append(f"{'capped':<24}{result.capped} of {result.devices} devices have more examples than count")
    if result.adoption is not None:
        taken, error = result.adoption.taken, result.adoption.standard_error
        lines.append(
            f"{'adoption':<24}about {taken:.0f} of {result.adoption.decided} took it (standard error {error:.0f})"
        )
    for name, each in result.statistics.items():
        if each.value is not None:
            lines.append(f"{name:<24}{each.kind} {each.value:.6g}")
        for share, value in each.quantiles.items():
            lines.append(f"{name:<24}{100 * float(share):g}% are below {value:.6g}")
        if each.counts and not each.quantiles:
            lines += _bars(name, each.edges, each.counts)
    return lines


def _counted(spread: Distribution) -> tuple[list[float], list[float]]:
    """The edges and counts of its histogram, without the bins before the first device and after the last one."""
    found = [place for place, count in enumerate(spread.counts) if count]
    first, last = max(found[0] - 1, 0), min(found[-1] + 1, len(spread.edges))
    return spread.edges[first:last], [float(count) for count in spread.counts[first : last + 1]]


def _bars(name: str, edges: list[float], counts: list[float]) -> list[str]:
    """A histogram, one line a bin."""
    names = [f"below {edges[0]:g}", *(f"{a:g} to {b:g}" for a, b in pairwise(edges)), f"from {edges[-1]:g}"]
    most = max(*counts, 1.0)
    return [
        name,
        *(f"  {label:<22}{count:>10.6g}  {'#' * int(40 * count / most + 0.5)}" for label, count in zip(names, counts)),
    ]
