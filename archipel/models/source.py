"""Where files of settings say that a network comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from archipel.errors import CommandError
from archipel.user_functions import call_function, check_arguments, load_function


class ModelSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where the network comes from: one of `zoo`, `onnx`, `bundle` and `python`."""

    zoo: str | None = None
    onnx: str | None = None
    bundle: str | None = None
    python: str | None = None
    key: tuple[str, ...] = ()
    arguments: dict[str, Any] = {}

    @property
    def source(self) -> tuple[str, str]:
        """(kind, name)."""
        given = [(kind, name) for kind in KINDS if (name := getattr(self, kind)) is not None]
        if len(given) != 1:
            raise CommandError(f"model: give one of {', '.join(KINDS)}, got {[kind for kind, _ in given] or 'none'}")
        return given[0]


KINDS = ("zoo", "onnx", "bundle", "python")


def make_network(source: ModelSource, seed: int, folder: Path | None = None) -> Any:
    """The PyTorch module of a source of kind "zoo", or what the function of one of kind "python" returns.

    Arguments:
        source: of one of these two kinds.
        seed: decides the parameters of a network of `archipel.models`, unless the arguments have a seed.
        folder: where a file of the user's lies; None: where you are.

    Raises CommandError that names the key, also for what a function of the user's raises.
    """
    import archipel.graph  # noqa: F401  (first: its error names the extra that is missing)

    kind, name = source.source
    if kind == "python":
        make = load_function(name, "model.python", folder)
        check_arguments(make, name, source.arguments, "model.arguments")
        return _checked(call_function(make, name, source.arguments, "model.python"), name)
    from archipel import models

    if name not in models.__all__ or not callable(getattr(models, name)):
        raise CommandError(f"model.zoo: no network {name!r}; there are {', '.join(models.__all__)}")
    make = getattr(models, name)
    arguments = {"seed": seed, **source.arguments}
    check_arguments(make, name, arguments, "model.arguments")
    return make(**arguments)


def _checked(made: Any, name: str) -> Any:
    from archipel.graph.model import Model

    # PyTorch is not needed for a Model; who returns a module has imported it.
    torch = sys.modules.get("torch")
    if not isinstance(made, Model) and not (torch and isinstance(made, torch.nn.Module)):
        raise CommandError(
            f"model.python: {name} returned {type(made).__qualname__}; it must return a torch.nn.Module or an "
            "archipel.Model"
        )
    return made
