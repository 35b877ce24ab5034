"""`archipel new`."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import click

from archipel.durable import creating_folder
from archipel.errors import CommandError

FIELDS = {"image": "site", "sensor": "machine", "tabular": "shop"}
TEMPLATES = tuple(FIELDS)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PROGRAM = "federation.py"


@click.command()
@click.argument("name", type=click.Path(path_type=Path))
@click.option("--template", type=click.Choice(TEMPLATES), default="image", show_default=True,
              help="image: a small convolutional network; sensor: one over windows of channels; tabular: a small "
              "network over rows of numbers.")  # fmt: skip
def new(name: Path, template: str) -> None:
    """Make the folder NAME with a small model in PyTorch and one function that loads your data.

    \b
    archipel new digits
    archipel new machines --template sensor
    cd digits && archipel simulate federation.toml && archipel up

    Change `load_data` in NAME/federation.py; until then it makes data of its own, with which everything runs. `archipel
    simulate` there trains the model over simulated devices, as federation.toml says. `archipel up` writes model.onnx
    and data.npz by federation.py, and trains the model as a federation of this machine, with a server.
    """
    if not _NAME.fullmatch(name.name):
        raise CommandError(f"{name}: a name has letters, digits, '.', '_' and '-', and begins with a letter or digit")
    if name.exists():
        raise CommandError(f"{name}: exists already; choose another name")
    source = resources.files("archipel.cli.start.new") / "templates"
    program = (source / f"{template}.py.txt").read_text(encoding="utf-8")
    program += (source / "exporting.py.txt").read_text(encoding="utf-8")
    toml = (source / "federation.toml").read_text(encoding="utf-8")
    toml = toml.replace("NAME", name.name).replace("FIELD", FIELDS[template])
    readme = (source / "README.md").read_text(encoding="utf-8").replace("NAME", name.name)
    name.parent.mkdir(parents=True, exist_ok=True)
    with creating_folder(name) as staging:
        (staging / _PROGRAM).write_text(program, encoding="utf-8")
        (staging / "federation.toml").write_text(toml, encoding="utf-8")
        (staging / "run.py").write_text((source / "run.py.txt").read_text(encoding="utf-8"), encoding="utf-8")
        (staging / "README.md").write_text(readme, encoding="utf-8")
        (staging / ".gitignore").write_text(
            "data.npz\nmodel.onnx*\nfederation/\nsimulation*/\n*.png\n", encoding="utf-8"
        )
    click.echo(f"{name}: made; next:")
    click.echo(f"  cd {name}")
    click.echo("  archipel simulate federation.toml          trains over simulated devices, in seconds")
    click.echo("  archipel up --devices 8 --rounds 10        the same with a server, keys and secure rounds")
    click.echo(f"your data: the function load_data in {name / _PROGRAM}")
