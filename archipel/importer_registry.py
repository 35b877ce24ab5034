"""The registry of importers: source framework -> the function that makes a Model of what the framework has.

`Model` (in `graph`) looks importers up, and `converter`, a room above, has them: neither may import the other for that,
so the table stands here, below both. An importer registers itself where it is written. Who loads the importers, the
top-level package says, which knows all rooms (archipel/__init__.py). They are loaded when somebody looks at the table
first: a device has no onnx, and who only reads ONNX files needs no converter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from archipel.errors import ModelImportError

Importer = Callable[..., Any]
"""It returns a Model, which has no name here: it belongs to a room above."""
F = TypeVar("F", bound=Importer)


class Importers(Mapping[str, Importer]):
    """The table, which is filled when it is looked at."""

    def __init__(self) -> None:
        self._found: dict[str, Importer] = {}
        self._load: Callable[[], None] | None = None

    def load_with(self, load: Callable[[], None]) -> None:
        """Say what imports the modules of the importers."""
        self._load = load

    def register(self, source: str) -> Callable[[F], F]:
        """Register the importer of a source framework: a decorator."""

        def add(function: F) -> F:
            self._found[source] = function
            return function

        return add

    def __getitem__(self, source: str) -> Importer:
        return self._filled()[source]

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    def _filled(self) -> dict[str, Importer]:
        if self._load is not None:
            self._load()
            self._load = None
        return self._found


IMPORTERS = Importers()


def find_importer(source: str) -> Importer:
    """The importer of a source framework. Raises ModelImportError for one that nobody registered."""
    if source not in IMPORTERS:
        raise ModelImportError(f"no importer for {source!r}; known: {', '.join(sorted(IMPORTERS))}")
    return IMPORTERS[source]
