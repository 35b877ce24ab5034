"""The pages of the Python API: one for each room that has public names, with an entry for every one of them.

A room's public names are those of its `__all__`; tests/api pins them. mkdocstrings writes the entries from docstrings.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "archipel": "Convert, train, compress and simulate: what most programs begin with.",
    "archipel.graph": "Models as graphs: load, build and check them.",
    "archipel.frontend": "Models from Python functions.",
    "archipel.autodiff": "Gradients and other transformations of graphs.",
    "archipel.training": "Losses, optimizers and training steps as graphs.",
    "archipel.training.cloud": "Training on PyTorch.",
    "archipel.compression": "Pruning, quantization, distillation and low rank.",
    "archipel.converter": "From a model to a signed bundle, and back.",
    "archipel.bundle": "The deployable file: manifest, weights, keys and signatures.",
    "archipel.lite_runtime": "The device's runtime: predict, learn, evaluate.",
    "archipel.client": "The agent that takes part in a federation.",
    "archipel.operator": "The operator's client for a server.",
    "archipel.simulation": "Federations without a server.",
    "archipel.strategies": "Federated algorithms.",
    "archipel.privacy": "Differential privacy in numbers.",
    "archipel.datasets": "Data sets, readers of files, and splits over devices.",
    "archipel.preprocessing": "Transforms of raw inputs as graphs.",
    "archipel.models": "Reference networks.",
    "archipel.insight": "Pages that show models and runs.",
    "archipel.insight_page": "The scripts and styles of these pages.",
    "archipel.server": "The federation server.",
    "archipel.edge": "The uplink of an edge server.",
}
"""Every room with public names, in the order of the navigation, and what it is for."""

INHERITED = {
    "archipel.autodiff.ForwardContext",
    "archipel.autodiff.RuleContext",
    "archipel.bundle.Bundle",
    "archipel.lite_runtime.Runtime",
}
"""Classes that have most of what people call from bases which are not public: their entries show that, too."""
PARTS = {
    "archipel.operator.OperatorClient": {
        "server": "archipel.operator.server.Server",
        "bundles": "archipel.operator.bundles.Bundles",
        "tasks": "archipel.operator.tasks.Tasks",
        "rounds": "archipel.operator.rounds.Rounds",
        "weights": "archipel.operator.weights.Weights",
        "weights_log": "archipel.operator.weights_log.WeightsLogs",
        "models": "archipel.operator.models.Models",
        "rollouts": "archipel.operator.rollouts.Rollouts",
        "devices": "archipel.operator.devices.Devices",
        "populations": "archipel.operator.populations.Populations",
        "enrolment_tokens": "archipel.operator.enrolment_tokens.EnrolmentTokens",
        "tokens": "archipel.operator.tokens.Tokens",
        "audit": "archipel.operator.audit.Audit",
    },
}
"""Attributes of public classes whose own classes are not public: they have entries behind that of the class."""


def page_name(room: str) -> str:
    """Where the page of a room is below docs/."""
    return f"reference/{room.partition('.')[2] or room}.md"


def home_of(room: str, name: str) -> str:
    """Where the entry of a public name is found: usually in the room, and in its file where a file has its name too.

    mkdocstrings would take the file for what is meant.
    """
    folder = ROOT.joinpath(*room.split("."))
    if not (folder / f"{name}.py").is_file():
        return f"{room}.{name}"
    for node in ast.walk(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            return f"{room}.{name}" if node.module == room else f"{node.module}.{name}"
    return f"{room}.{name}"


def public_names(room: str) -> list[str]:
    """The names in `__all__` of a room, read without importing it.

    Raises ValueError for a room that has none.
    """
    file = ROOT.joinpath(*room.split("."), "__init__.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value), key=str.lower)
    raise ValueError(f"{file}: there is no list __all__; write one, or take {room} from ROOMS")


def room_page(room: str) -> str:
    """The Markdown of a room's page."""
    names = public_names(room)
    links = ", ".join(f"[`{name}`](#{home_of(room, name)})" for name in names)
    entries = "\n\n".join(entry for name in names for entry in _entries(room, name))
    return f"# {room}\n\n{ROOMS[room]}\n\n{links}\n\n{entries}\n"


def _entries(room: str, name: str) -> list[str]:
    """The entry of a public name, and those of its parts."""
    inherited = "\n      inherited_members: true" if f"{room}.{name}" in INHERITED else ""
    parts = PARTS.get(f"{room}.{name}", {})
    return [
        _entry(home_of(room, name), room, name) + inherited,
        *(_entry(home, room, f"{name}.{part}") for part, home in parts.items()),
    ]


def _entry(home: str, room: str, name: str) -> str:
    return f"::: {home}\n    options:\n      heading: {room}.{name}\n      toc_label: {name}"


def overview() -> str:
    """The Markdown of the page that lists the rooms."""
    rows = "\n".join(
        f"| [`{room}`]({page_name(room).removeprefix('reference/')}) | {what} | {len(public_names(room))} |"
        for room, what in ROOMS.items()
    )
    return f"""# Python API

Every public name of the package, with its arguments, shapes, units and errors. The entries are the docstrings of the
code. A name that is not here may change without notice.

| module | what it is for | names |
|---|---|---|
{rows}

Errors that archipel raises derive from `archipel.errors.ArchipelError`; their messages say what was expected, what
came, and what to do.
"""


def pages() -> dict[str, str]:
    """The Markdown of every page of the reference, by its path below docs/."""
    return {"reference/index.md": overview()} | {page_name(room): room_page(room) for room in ROOMS}
