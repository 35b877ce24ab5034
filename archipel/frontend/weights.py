"""Arrays that a function reads from outside: weights and constants, and the names of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from archipel.frontend.emit import Emitter
from archipel.frontend.values import Tensor, refuse


class Weights:
    """The arrays that functions have read from closures, modules, objects and dicts.

    Arrays of float32 or float64 with one axis or more are weights: initializers of the graph that can be trained. All
    others are constants. A weight is named after the variable that holds it. Of one in a container the name is its path
    in there ("fc.weight", "layers.0.w"), which begins with the variable's name for a list or tuple, and without it for
    a dict or object, as in the state of a PyTorch module.

    Attributes:
        names: of the weights so far, in the order in which the function reads them.
    """

    def __init__(self, e: Emitter) -> None:
        self._e = e
        self.names: list[str] = []
        # By id, each with the object itself, so that no other object can get its id.
        self._wrapped: dict[int, tuple[object, Any]] = {}
        self._paths: dict[int, tuple[object, str]] = {}

    def wrap(self, value: Any, path: str) -> Any:
        """An object from outside, as expressions have it. `path`: the variable's name, or its place in a container."""
        named = isinstance(value, np.ndarray | tuple | list)
        return self._wrap(value, path if named else "")

    def child(self, parent: object, key: str, value: Any) -> Any:
        """An attribute of an object from outside."""
        return self._wrap(value, _joined(self._paths.get(id(parent), (None, ""))[1], key))

    def _wrap(self, value: Any, path: str) -> Any:
        if id(value) in self._wrapped:
            return self._wrapped[id(value)][1]
        if isinstance(value, np.generic):
            return Tensor(const=np.asarray(value))
        found: Any
        if isinstance(value, np.ndarray):
            found = self._array(value, path)
        elif isinstance(value, Mapping):
            found = {key: self._wrap(item, _joined(path, str(key))) for key, item in value.items()}
        elif isinstance(value, tuple | list):
            parts = [self._wrap(item, _joined(path, str(i))) for i, item in enumerate(value)]
            found = parts if isinstance(value, list) else tuple(parts)
        else:
            if hasattr(value, "__dict__"):
                self._paths.setdefault(id(value), (value, path))
            return value
        self._wrapped[id(value)] = (value, found)
        return found

    def _array(self, array: np.ndarray, path: str) -> Tensor:
        if array.dtype not in (np.float32, np.float64) or array.ndim == 0:
            return Tensor(const=array)
        root = self._e.root
        if path in root.graph.initializers or any(value.name == path for value in root.graph.inputs):
            refuse(f"two arrays are called {path!r}; give one of the variables or keys another name")
        root.free_name(path)
        self.names.append(path)
        return Tensor(root.initializer(path, array))


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
