"""The registry of importers: source framework -> the function that makes a Model from that framework's model.

`Model` (in `graph`) looks importers up, and `converter`, a package above it, contains them. `graph` must not import
`converter`, so the table is here, below both. An importer registers itself in its own file. The top-level package,
which knows all packages, says how importers are loaded (archipel/__init__.py). They are loaded when the table is first
read: a device has no onnx, and a program that only reads ONNX files needs no converter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from archipel.errors import ModelImportError

Importer = Callable[..., Any]
"""It returns a Model, a type that this file cannot name, because it belongs to a package above."""
F = TypeVar("F", bound=Importer)


class Importers(Mapping[str, Importer]):
    """The table, which is filled when it is first read."""

    def __init__(self) -> None:
        self._importers: dict[str, Importer] = {}
        self._load: Callable[[], None] | None = None

    def load_with(self, load: Callable[[], None]) -> None:
        """Set the function that imports the importers' modules."""
        self._load = load

    def register(self, source: str) -> Callable[[F], F]:
        """Register the importer of a source framework: a decorator."""

        def add(function: F) -> F:
            self._importers[source] = function
            return function

        return add

    def __getitem__(self, source: str) -> Importer:
        return self._filled()[source]

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    def _filled(self) -> dict[str, Importer]:
        # Forgotten only after success, so that a failed import is reported again at the next look-up.
        if self._load is not None:
            self._load()
            self._load = None
        return self._importers


IMPORTERS = Importers()


def find_importer(source: str) -> Importer:
    """The importer of a source framework. Raises ModelImportError for one that nobody registered."""
    if source not in IMPORTERS:
        raise ModelImportError(f"no importer for {source!r}; known: {', '.join(sorted(IMPORTERS))}")
    return IMPORTERS[source]
