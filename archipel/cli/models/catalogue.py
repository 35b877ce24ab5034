"""`archipel models`: the networks of the catalogue."""

from __future__ import annotations

import click
import msgspec

from archipel.bundle import ModelCard
from archipel.cli.input_output.card import card_lines
from archipel.cli.input_output.tables import as_json, show, table
from archipel.cli.models.hub import pull, push
from archipel.errors import CommandError
from archipel.models.catalogue import CATALOGUE, Field, Network, find


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A network as the commands print it in JSON. `card` is what its recipe has reached, None without one."""

    name: str
    task: str
    inputs: list[dict[str, object]]
    outputs: list[list[int]]
    parameters: int
    flops_per_example: int
    peak_bytes: int
    paper: str
    licence: str
    recipe: str | None
    card: ModelCard | None


@click.group()
def models() -> None:
    """Show the networks of `archipel.models`: what they take, how large they are, how to train them, what they reached.

    They come with archipel, as functions of a seed. The models of a server, with their versions, are in
    `archipel model`.

    \b
    archipel models list
    archipel models list --task "image classification"
    archipel models show resnet18
    archipel models show resnet18 --recipe > resnet18.toml
    archipel models push digits digits.bundle --population pupils
    archipel models pull digits -o digits.bundle --max-size 300kB --max-latency 5ms
    """


models.add_command(push)
models.add_command(pull)


@models.command("list")
@click.option("--task", help='Only networks for this task, such as "keyword spotting".')
@as_json
def list_(task: str | None, as_json: bool) -> None:
    """List every network, by name.

    FLOPs are for one example, two for each multiplication with its addition. "measured" is what the recipe has reached.

    \b
    archipel models list
    """
    tasks = sorted({network.task for network in CATALOGUE.values()})
    if task is not None and task not in tasks:
        raise CommandError(f"--task {task}: no network is for that; tasks are {', '.join(tasks)}")
    chosen = [network for network in CATALOGUE.values() if task in (None, network.task)]
    rows = [
        (f"{each.parameters:,}", _short(each.flops), each.name, each.task, _inputs(each), _measured(each))
        for each in chosen
    ]
    head = ("parameters", "FLOPs", "network", "task", "input", "measured")
    show([_summary(each) for each in chosen], as_json, table(head, rows, numbers=2))


@models.command("show")
@click.argument("name")
@click.option("--recipe", is_flag=True, help="Print the recipe instead, a configuration of `archipel train`.")
@click.option("--variant", metavar="NAME", help="With --recipe: the one for other data or a smaller network.")
@as_json
def show_(name: str, recipe: bool, variant: str | None, as_json: bool) -> None:
    """Show one network: shapes, size, source, and what its recipe has reached on which data.

    \b
    archipel models show resnet18
    archipel models show resnet18 --recipe > resnet18.toml
    archipel models show resnet18 --recipe --variant small > resnet18-small.toml
    """
    network = find(name)
    if variant is not None and not recipe:
        raise CommandError("--variant is for --recipe; give both")
    if variant is not None and variant not in network.variants:
        raise CommandError(f"--variant {variant}: {name} has {', '.join(network.variants) or 'none'}")
    if recipe:
        path = network.recipe if variant is None else network.variants[variant]
        if path is None:
            raise CommandError(f"{name} has no recipe; `archipel models list --json` says which networks have one")
        click.echo(path.read_text(encoding="utf-8"), nl=False)
        return
    show(_summary(network), as_json, _lines(network))


def _lines(network: Network) -> list[str]:
    card = network.card
    return [
        f"{network.name}: {network.task}",
        *(f"  <- {each.name}: {each.dtype}[batch, {_shape(each)}]{_range(each)}" for each in network.inputs),
        *(f"  -> float32[batch, {', '.join(map(str, shape))}]" for shape in network.outputs),
        f"  {network.parameters:,} parameters, {network.flops:,} FLOPs per example",
        f"  peak {network.peak_bytes:,} bytes of weights and values for one example",
        f"  from {network.paper or 'this package'}; its code here is under {network.licence}",
        f"  in Python: archipel.models.{network.name}(seed)",
        f"  recipe: {'none' if network.recipe is None else f'archipel models show {network.name} --recipe'}",
        *(
            f"  another recipe: archipel models show {network.name} --recipe --variant {each}"
            for each in network.variants
        ),
        *(["nothing was measured yet"] if card is None else card_lines({**msgspec.to_builtins(card), "recipe": ""})),
    ]


def _summary(network: Network) -> Summary:
    recipe = network.recipe
    return Summary(
        name=network.name,
        task=network.task,
        inputs=[{"name": each.name, "dtype": each.dtype, "shape": list(each.shape)} for each in network.inputs],
        outputs=[list(shape) for shape in network.outputs],
        parameters=network.parameters,
        flops_per_example=network.flops,
        peak_bytes=network.peak_bytes,
        paper=network.paper,
        licence=network.licence,
        recipe=None if recipe is None else recipe.read_text(encoding="utf-8"),
        card=network.card,
    )


def _shape(each: Field) -> str:
    return ", ".join(map(str, each.shape))


def _range(each: Field) -> str:
    return f" below {each.below:,}" if each.dtype == "int64" else ""


def _inputs(network: Network) -> str:
    shapes = "x".join(map(str, network.inputs[0].shape))
    kind = "tokens " if network.inputs[0].dtype == "int64" else ""
    return f"{kind}{shapes}"


def _measured(network: Network) -> str:
    card = network.card
    if card is None or not card.metrics:
        return "-"
    first = card.metrics[0]
    # A recipe may be for a smaller network than the published one that the row is of.
    size = "" if card.parameters == network.parameters else f" ({card.parameters:,} parameters)"
    return f"{first.name} {first.value:.4g}, {first.data}{size}"


def _short(count: int) -> str:
    """A count with three digits, such as 3.63 G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
