"""`archipel up`."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import Literal

import click
from click.core import ParameterSource
from rich.console import Console

from archipel.cli.input_output.publisher_keys import read_signing_key, signing_key
from archipel.cli.input_output.spelling import argument_rules, rule, spells_options
from archipel.cli.input_output.strategy_options import STRATEGY_RULES, strategy_option
from archipel.durable import write_durably
from archipel.errors import CommandError
from archipel.strategies.registry import STRATEGIES

RATES = {"sgd": 0.05, "adam": 0.001}
BUNDLED = (
    "strategy",
    "strategy_option",
    "batch_norm",
    "loss_output",
    "loss",
    "optimizer",
    "lr",
    "epochs",
    "batch_size",
)
"""Options that a bundle has decided."""


RULES = [
    *STRATEGY_RULES,
    rule(r", and trainable= may leave them out", ""),
    rule(r"\btrainable=", "`archipel convert --trainable`"),
    *argument_rules(
        {name: f"--{name.replace('_', '-')}" for name in ("epochs", "batch_size", "batch_norm", "loss_output", "lr")},
        ["training", "step_options", "step_graph", "sgd", "adam"],
    ),
    rule(r"^(step_options|step_graph): ", ""),
]
"""How errors of the conversion are spelled."""


@click.command()
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.argument("data", type=click.Path(path_type=Path), required=False)
@click.option("--devices", type=click.IntRange(2, 256), default=8, show_default=True, help="How many local devices.")
@click.option("--rounds", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Rounds of training.")
@click.option("--split", default="iid", show_default=True, metavar="HOW",
              help="Which examples a device has: iid; dirichlet:0.3, other mixtures of labels; by-FIELD, whole groups "
              "by an entry of DATA, such as by-person; or another partitioner of docs/data.md, such as shards:2 or "
              "sorted:FIELD.")  # fmt: skip
@click.option("--strategy", type=click.Choice(sorted(STRATEGIES)), default="fedavg", show_default=True,
              help="The federated algorithm.")  # fmt: skip
@strategy_option
@click.option("--batch-norm", type=click.Choice(["train", "frozen", "folded"]), default="train", show_default=True,
              help="BatchNormalization in training, as for `archipel convert`.")  # fmt: skip
@click.option("--loss-output", default="", metavar="NAME",
              help="The output of the model that the loss reads. Default: the first.")  # fmt: skip
@click.option("--loss", type=click.Choice(["cross_entropy", "binary_cross_entropy", "mse", "l1", "huber"]),
              help="Default: cross_entropy for whole numbers as labels (binary_cross_entropy for 0 and 1, where the "
              "model answers one number), else mse.")  # fmt: skip
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]), default="sgd", show_default=True,
              help="What devices train with.")  # fmt: skip
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), help="Learning rate. Default: 0.05 with sgd, 0.001 with adam."
)
@click.option("--epochs", type=click.IntRange(1), default=2, show_default=True, help="Epochs of a device in a round.")
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Examples in one step.")
@click.option("--evaluate-every", type=click.IntRange(0), default=0, show_default=True,
              help="After every so many rounds devices also measure the new version; 0: never.")  # fmt: skip
@click.option("--hold-out", type=click.FloatRange(0, 0.9), default=0.1, show_default=True,
              help="Share of the examples that no device gets, to measure the model before and after.")  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the split and of --hold-out."
)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("federation"), show_default=True,
              help="Everything is written here; the same command again goes on where it was stopped.")  # fmt: skip
@click.option("--stay", "stays", is_flag=True, help="Server and devices go on after the training, until Ctrl-C, for "
              "the dashboard, further tasks, and versions on devices.")  # fmt: skip
@signing_key
@spells_options(RULES)
def up(
    model: Path | None,
    data: Path | None,
    devices: int,
    rounds: int,
    split: str,
    strategy: str,
    strategy_option: tuple[str, ...],
    batch_norm: Literal["train", "frozen", "folded"],
    loss_output: str,
    loss: str | None,
    optimizer: str,
    lr: float | None,
    epochs: int,
    batch_size: int,
    evaluate_every: int,
    hold_out: float,
    seed: int,
    folder: Path,
    stays: bool,
    key_file: Path | None,
) -> None:
    """Train MODEL on DATA as a federation of this machine: server, keys, devices, secure rounds, curves, result.

    \b
    archipel up model.onnx data.npz
    archipel up model.onnx data.npz --devices 8 --rounds 10 --split dirichlet:0.3
    archipel up model.onnx people.npz --split by-person --lr 0.05
    archipel up model.bundle data.npz --devices 8

    MODEL is an ONNX file (torch.onnx.export writes one; give it optimize=False), a .pt2 file, or a .bundle of `archipel
    convert`, which says itself how devices train. DATA is an .npz with an entry for each of the model's inputs, or `x`,
    and the labels as `y`; or a .csv with a head, labels in the column `y` or the last one, numbers in all others; or
    Parquet and Arrow files (all but .npz: pip install 'archipel[data]'). In a folder of `archipel new` both may be left
    out.

    Without --key it signs with your development key. The bundle's policy is for trying out: a sum of two devices is
    enough, and it expects no device that works with the server.

    --folder has server, keys and devices as they are on real machines (docs/quickstart.md says how to take it apart),
    and at the end curves.png and weights.safetensors. Ctrl-C stops all processes. With --stay they go on when the
    training has ended, and the same command starts them again later.
    """
    # These import much, which takes seconds; wrong options are told without them.
    from archipel.cli.start.up.prepare import Plan, fingerprint, prepare, read_plan
    from archipel.cli.start.up.running import WEIGHTS_FILE, finish, measure, print_next, run, stay
    from archipel.cli.start.up.sources import check_same, find_sources

    console = Console()
    # SystemExit unwinds the ExitStack, so that `kill` ends the other processes in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, _terminate)
    found = read_plan(folder)
    context = click.get_current_context()
    given = {name: value for name, value in context.params.items()
             if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}  # fmt: skip
    if found is None:
        model, data, program = find_sources(model, data)
        decided = [f"--{name.replace('_', '-')}" for name in BUNDLED if name in given]
        if model.suffix == ".bundle" and decided:
            raise CommandError(
                f"{model}: the bundle decides {', '.join(decided)}; leave it out, or convert anew with it"
            )
        plan = Plan(
            model=fingerprint(model), data=fingerprint(data), program=program, devices=devices, rounds=rounds,
            split=split, strategy=strategy, strategy_option=strategy_option, batch_norm=batch_norm,
            loss_output=loss_output, loss=loss or "", optimizer=optimizer,
            lr=RATES[optimizer] if lr is None else lr, epochs=epochs, batch_size=batch_size, seed=seed,
            evaluate_every=evaluate_every, hold_out=hold_out,
        )  # fmt: skip
        made = prepare(folder, model, data, plan, read_signing_key(key_file))
        found = made.plan
        sizes = f"{min(made.sizes)} to {max(made.sizes)}" if len(set(made.sizes)) > 1 else str(made.sizes[0])
        console.print(f"{folder}: {devices} devices with {sizes} examples each, loss {found.loss}", soft_wrap=True)
        if made.doubt:
            console.print(made.doubt, soft_wrap=True, highlight=False, markup=False)
        if model.suffix != ".bundle":
            console.print("policy for trying out: sums of 2 devices are allowed, none works with the server")
    else:
        check_same(folder, found, given, model, data)
        console.print(f"{folder}: goes on with the federation that is there", soft_wrap=True)
    try:
        with ExitStack() as stack:
            federation, metrics, weights = run(folder, found, stack, console)
            if not stays:
                stack.close()
            write_durably(folder / WEIGHTS_FILE, weights, 0o644)
            finish(folder, metrics, console)
            measure(folder, console)
            print_next(folder, console, stays)
            if stays:
                stay(federation, console)
    except KeyboardInterrupt:
        console.print(f"stopped; `archipel up --folder {quote(str(folder))}` goes on", soft_wrap=True)
        raise


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
