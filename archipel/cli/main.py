"""The command `archipel`: the table of its commands, its help, and one line for every error."""

from __future__ import annotations

import importlib
import os
import sys
from difflib import get_close_matches
from typing import NoReturn

import click

from archipel import __version__
from archipel.durable import reason_of
from archipel.errors import ArchipelError, MissingExtraError

COMMANDS: dict[str, tuple[str, str]] = {
    # name: ("module:function" in archipel.cli, one line for --help).
    # A module is imported when its command is called, so that a device needs no extra to start.
    "access": ("operations.access:access", "Make and revoke the access tokens of people and scripts."),
    "audit": ("operations.audit:audit", "Read a server's audit log and check it for changes."),
    "bench": ("devices.bench:bench", "Measure a bundle's latency, cold start, memory and operators."),
    "bundle": ("federation.bundle:bundle", "List a server's bundles, send one, fetch one."),
    "compare": ("models.compare:compare", "Compare two forms of a model, value by value."),
    "compress": ("models.compress:compress_command", "Make an ONNX model small by a recipe, or search for one."),
    "convert": ("models.convert.command:convert_command", "Make a signed bundle from an ONNX model."),
    "data": ("data.command:data", "Convert, divide and look into data for training."),
    "demo": ("start.demo.command:demo", "Run a whole federation on real data and write report.html."),
    "device": ("devices.device:device", "Take part in a federation with this machine; see what it did."),
    "doctor": ("start.doctor:doctor", "Show what is installed and what is missing."),
    "export": ("models.export:export_command", "Write what was learned as ONNX, safetensors or PyTorch."),
    "fit": ("devices.fit:fit", "Train a bundle further on data in files."),
    "insight": ("models.insight:insight", "Look into a model or a training run in the browser."),
    "inspect": ("models.inspect:inspect", "Show the contents of a bundle or an ONNX file."),
    "keys": ("models.keys:keys", "Make an Ed25519 key pair for signing or enrolment."),
    "model": ("federation.model:model", "Register, promote and roll back a server's versions of models."),
    "models": ("models.catalogue:models", "Show networks to begin with: size, recipe, results."),
    "new": ("start.new.command:new", "Make a folder to begin with: own data, own model, `archipel up`."),
    "plan": ("models.plan:plan_command", "Predict training on several devices: time, memory, best way."),
    "population": ("operations.population:population", "List the devices of a server, release or revoke them."),
    "rollout": ("federation.rollout:rollout", "Bring a version to more and more devices, with health gates."),
    "round": ("federation.round:round", "Show who took part in a task's rounds, and the results."),
    "run": ("devices.run:run", "Predict with a bundle, or evaluate it, on data in files."),
    "serve": ("operations.serve:serve", "Set up, run, back up and restore a federation server."),
    "simulate": ("federation.simulate:simulate", "Train a federation on this machine, without a server."),
    "slots": ("devices.slots:slots", "Keep two models on a device: install, test, switch, go back."),
    "task": ("federation.task:task", "Start, watch and stop the tasks of a server."),
    "token": ("operations.token:token", "Make one-time enrolment tokens for devices."),
    "train": ("models.train.command:train_command", "Train a network with PyTorch, as a TOML file says."),
    "tune": ("federation.tune:tune", "Find good rates and other settings for a simulated federation."),
    "up": ("start.up.command:up", "Train a model on own data as a federation of this machine."),
    "verify": ("models.verify:verify", "Check a bundle: signature, digests, limits, graphs, self-test."),
    "version": ("start.version:version", "Print the version of archipel."),
}

GROUPS: dict[str, tuple[str, ...]] = {
    # Title in --help: its commands. Both are shown in this order, and every command is in one group, in whose folder
    # it lies.
    "Start": ("new", "up", "demo", "doctor", "version"),
    "Data": ("data",),
    "Models": (
        "train",
        "plan",
        "keys",
        "convert",
        "compress",
        "compare",
        "export",
        "inspect",
        "insight",
        "verify",
        "models",
    ),
    "Devices": ("run", "fit", "bench", "slots", "device"),
    "Federation": ("simulate", "tune", "task", "round", "bundle", "model", "rollout"),
    "Operations": ("serve", "token", "population", "access", "audit"),
}

# Package that commands import: the extra that installs it, for the error where it is missing.
EXTRAS = {"onnx": "convert", "onnx_ir": "convert", "onnxscript": "convert", "torch": "cloud", "flask": "server",
          "sqlalchemy": "server", "alembic": "server", "gunicorn": "server", "fsspec": "server", "rich": "demo",
          "torchmetrics": "cloud", "matplotlib": "demo", "psutil": "demo", "jinja2": "demo",
          "optuna": "search", "tomli_w": "convert", "tensorboardX": "curves", "sklearn": "sklearn",
          "skl2onnx": "sklearn"}  # fmt: skip


class LazyGroup(click.Group):
    """Lists every command from the table and imports a command's module only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"archipel.cli.{module}"), function)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # Click suggests names of commands that are loaded only, so of none.
            near = get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                # Padded, so that the columns of all groups begin at the same place.
                formatter.write_dl([(name.ljust(width), COMMANDS[name][1]) for name in names])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
def archipel() -> None:
    """Device-edge-cloud federated learning: one ONNX graph that predicts, trains and federates everywhere.

    Begin with `archipel new` or `archipel up`, or see `archipel demo`. `archipel COMMAND --help` explains a command and
    has examples.
    """


def main() -> NoReturn:
    """The console entry point. Ends the process with one of these exit codes:

    0: done. 1: an error, with one line on stderr. 2: wrong usage. 130: Ctrl-C. Errors that nobody expected keep their
    traceback.
    """
    try:
        # Without standalone mode click raises its errors here, and does not print and exit by itself.
        archipel.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        if os.environ.get("RANK", "0") != "0":  # of what torchrun starts, the first process speaks
            sys.exit(130)
        fail("interrupted", 130)
    except ArchipelError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        # A module that no extra installs is missing because of a mistake in archipel, which needs its traceback.
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        fail(str(MissingExtraError(package, EXTRAS[package])))
    except BrokenPipeError:
        # The reader of standard output has ended, as in `archipel ... | head`: that is no error to print. Closing
        # stderr keeps Python from printing one when it flushes standard output at exit.
        sys.stderr.close()
        sys.exit(1)
    except MemoryError as error:
        # NumPy says how much it was for; Python itself says nothing.
        fail(f"not enough memory{f' ({error})' if str(error) else ''}; give less data at once, or a smaller batch")
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        fail(f"{name}{reason_of(error) if error.strerror else error}")
    sys.exit(0)


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one line on stderr and end the process with `code`."""
    click.echo(f"archipel: {message}", err=True)
    sys.exit(code)
