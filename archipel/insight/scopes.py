"""Scopes, by which a graph is folded: from the names of nodes, from the exporter's notes, and from weights' names.

A node "block1/conv" is in scope block1. Exporters of PyTorch write names without scopes, but note the module that a
node comes from; and where they do not, the weight "block1.conv.weight" says that its reader is in block1. In a graph
whose nodes have names without scopes, a node with none of these is where what it reads was made.
"""

from __future__ import annotations

import ast
import itertools

import onnx_ir as ir

from archipel.insight.limits import MAX_SCOPE_DEPTH, MAX_TEXT, cut
from archipel.insight.page_data import ScopeData

_MODULES = "pkg.torch.onnx.name_scopes"
_NOWHERE = "_empty_nn_module_stack_from_metadata_hook"
"""What PyTorch writes in place of modules for what belongs to none, such as the size of an input."""


class Scopes:
    """The scopes of a graph as they are found; place 0 is the whole graph."""

    def __init__(self) -> None:
        self.found = [ScopeData(name="")]
        self._places: dict[tuple[str, ...], int] = {(): 0}

    def place(self, path: tuple[str, ...]) -> int:
        """The place of the scope with this path, made with all around it."""
        path = tuple(cut(part) for part in path[:MAX_SCOPE_DEPTH])
        for length in range(1, len(path) + 1):
            if path[:length] not in self._places:
                parent = self._places[path[: length - 1]]
                self._places[path[:length]] = len(self.found)
                self.found.append(ScopeData(name=path[length - 1], parent=parent))
        return self._places[path]


def scope_paths(graph: ir.Graph, stored: set[ir.Value], inherit: bool = True) -> dict[ir.Node, tuple[str, ...]]:
    """The path of the scope of each node of a graph or a body.

    Arguments:
        graph: one level.
        stored: values that are weights.
        inherit: whether a node without a scope of its own may take that of another one.
    """
    own = {node: _own_path(node, stored) for node in graph}
    named = any(len(_parts(node.name or "", "/")) > 1 for node in graph)
    if not inherit or named:
        return {node: path or () for node, path in own.items()}
    after: dict[ir.Node, tuple[str, ...]] = {}
    following: tuple[str, ...] = ()
    for node, path in reversed(own.items()):
        after[node] = following
        following = following if path is None else path
    paths: dict[ir.Node, tuple[str, ...]] = {}
    for node, path in own.items():
        makers = [value.producer() for value in node.inputs if value is not None]
        before = next((paths[maker] for maker in makers if maker is not None and maker in paths), None)
        if path is not None:
            paths[node] = path
        elif before is not None:
            paths[node] = _shared(before, after[node]) if _has_weights(node, stored) else before
    # What is computed from constants alone is where it is read first.
    for node in reversed(list(own)):
        if node not in paths:
            readers = [use.node for value in node.outputs for use in value.uses()]
            paths[node] = next((paths[reader] for reader in readers if reader in paths), ())
    return paths


def _own_path(node: ir.Node, stored: set[ir.Value]) -> tuple[str, ...] | None:
    """The scope that the node itself tells; None where it tells none."""
    named = _parts(node.name or "", "/")
    if len(named) > 1:
        return named[:-1]
    modules = _modules(node)
    if modules is not None:
        return modules
    for value in node.inputs:
        if value is not None and value in stored and value.name:
            # Of block1.conv.weight the last part is the tensor, the one before it the module that reads it.
            parts = _parts(value.name, ".")
            if len(parts) > 1:
                return parts[:-2]
    # Inputs of the graph are outside of all scopes, and so is what only looks at them.
    return () if any(value is not None and value.is_graph_input() for value in node.inputs) else None


def _has_weights(node: ir.Node, stored: set[ir.Value]) -> bool:
    """Whether it reads a stored matrix, such as one that was computed from a module's weights and lost their name."""
    return any(
        value is not None and value in stored and value.shape is not None and len(value.shape) > 1
        for value in node.inputs
    )


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the innermost scope around both."""
    alike = (a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return tuple(alike)


def _parts(name: str, separator: str) -> tuple[str, ...]:
    return tuple(part for part in name[: MAX_TEXT * 4].split(separator) if part)


def _modules(node: ir.Node) -> tuple[str, ...] | None:
    """The modules of PyTorch around a node, none for one of the outermost: the note is a list of dotted names, from the
    outermost, which has no name, to the node's own. None where there is no such note.

    The note may be anybody's, and anything.
    """
    note = node.metadata_props.get(_MODULES, "")
    if not note or len(note) > MAX_TEXT * 16:
        return None
    try:
        names = ast.literal_eval(note)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(names, list) or len(names) < 2 or not all(isinstance(name, str) for name in names):
        return None
    if names[0] == _NOWHERE:
        return None
    # The last is the node's own name, the one before it the dotted path of the module that made it.
    return _parts(names[-2], ".")
