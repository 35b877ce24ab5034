"""`archipel doctor`: show what is installed, what is missing, and what protects this machine from graphs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

import click
import onnxruntime

import archipel
from archipel.cli.input_output.tables import protection_rows, table
from archipel.client.memory.keystore import SECRETS
from archipel.engine_registry import ENGINES
from archipel.lite_runtime.confinement import folder_modes, holdings, trial

_EXTRA = re.compile(r"extra\s*==\s*['\"](\w+)['\"]")


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
def doctor(folder: Path | None) -> None:
    """Show what is installed, which accelerators and extras there are, and what protects this machine from graphs.

    \b
    archipel doctor
    archipel doctor device

    The command starts a process that is confined like one that runs graphs, and lets it try what it must not be able to
    do. With FOLDER, a device's folder, it also checks the modes of the device's keys. The exit code is 0 whatever it
    finds: the base installation is a complete device.
    """
    click.echo(f"archipel      {archipel.__version__}  ({Path(archipel.__file__).parent})")
    click.echo(f"Python        {platform.python_version()}  ({sys.executable})")
    # The cores that this process may use, which can be fewer than the machine has (containers, taskset).
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    click.echo(f"machine       {platform.system()} {platform.machine()}, {cores} usable cores")
    click.echo(f"ONNX Runtime  {onnxruntime.__version__}: {', '.join(onnxruntime.get_available_providers())}")
    click.echo(f"PyTorch       {_torch()}")
    installed = [name for name, engine in sorted(ENGINES.items()) if engine.installed]
    click.echo(f"engines       {', '.join(['onnxruntime', *installed])}  (--delegate, and engine = in device.toml)")
    click.echo()
    for extra, packages in _requirements().items():
        missing = [name for name in packages if _version(name) is None]
        title = "device (base)" if extra == "" else extra
        state = "ok" if not missing else "missing: " + ", ".join(missing)
        click.echo(f"{title:<14}{state}")
        if missing:
            remedy = "archipel" if extra == "" else f"archipel[{extra}]"
            click.echo(f"{'':<14}install with: pip install '{remedy}'")
    click.echo()
    modes = [] if folder is None else folder_modes(folder, SECRETS)
    for line in table(("protection", "holds", ""), protection_rows([*holdings(), *trial(), *modes])):
        click.echo(line)


def _requirements() -> dict[str, list[str]]:
    """The packages that each extra needs, from the installed metadata; "" is the base installation."""
    packages: dict[str, list[str]] = {"": []}
    for requirement in importlib.metadata.requires("archipel") or []:
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        extra = _EXTRA.search(requirement)
        # An extra may consist of other extras: archipel[convert].
        if name != "archipel":
            packages.setdefault(extra.group(1) if extra else "", []).append(name)
    return packages


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> str:
    # Checked by metadata first: importing PyTorch takes seconds, and fails without the extra.
    if _version("torch") is None:
        return "not installed (only the cloud trains with it): pip install 'archipel[cloud]'"
    from archipel.training.cloud.accelerator import describe

    return describe()
