"""Registry of importers: source framework -> "module:function" that makes a Model.

The functions live in `archipel.converter.importers`, above this package, and bring their framework along; they are
resolved by name when first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from archipel.errors import ModelImportError

if TYPE_CHECKING:
    from archipel.graph.model import Model

IMPORTERS: dict[str, str] = {
    "sklearn": "archipel.converter.importers.sklearn:from_sklearn",
    "torch": "archipel.converter.importers.torch:from_torch",
}


def importer(source: str) -> Callable[..., Model]:
    """The importer of a source framework. Raises ModelImportError for one that nobody registered."""
    target = IMPORTERS.get(source)
    if target is None:
        raise ModelImportError(f"no importer for {source!r}; known: {', '.join(sorted(IMPORTERS))}")
    module, _, function = target.partition(":")
    found: Callable[..., Model] = getattr(importlib.import_module(module), function)
    return found
