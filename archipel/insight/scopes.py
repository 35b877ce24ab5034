"""Scopes, by which a graph is folded: from the names of nodes, from the exporter's notes, and from weights' names.

A node "block1/conv" is in scope block1. Exporters of PyTorch write names without scopes, but note the module that a
node comes from; and where they do not, the weight "block1.conv.weight" says that its reader is in block1. In a graph
whose nodes have names without scopes, a node with none of these is where what it reads was made.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

import onnx_ir as ir

from archipel.insight.limits import MAX_SCOPE_DEPTH, MAX_TEXT, cut
from archipel.insight.page_data import ScopeData

_MODULES = "pkg.torch.onnx.name_scopes"


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


def names_scopes(graph: ir.Graph) -> bool:
    """Whether names of the graph's nodes have scopes in them."""
    return any(len(_parts(node.name or "", "/")) > 1 for node in graph)


def scope_of(node: ir.Node, known: Mapping[ir.Node, tuple[str, ...]], stored: set[ir.Value]) -> tuple[str, ...]:
    """The path of the scope of a node.

    Arguments:
        node: of a graph or a body.
        known: the paths of the nodes before it, from which it may take its own; empty where names have scopes.
        stored: values that are weights.
    """
    named = _parts(node.name or "", "/")
    if len(named) > 1:
        return named[:-1]
    modules = _modules(node)
    if modules:
        return modules
    for value in node.inputs:
        if value is not None and value in stored and value.name:
            # Of block1.conv.weight the last part is the tensor, the one before it the module that reads it.
            parts = _parts(value.name, ".")
            if len(parts) > 2:
                return parts[:-2]
            if len(parts) == 2:
                return ()
    makers = [value.producer() for value in node.inputs if value is not None]
    return next((known[maker] for maker in makers if maker is not None and maker in known), ())


def _parts(name: str, separator: str) -> tuple[str, ...]:
    return tuple(part for part in name[: MAX_TEXT * 4].split(separator) if part)


def _modules(node: ir.Node) -> tuple[str, ...]:
    """The modules of PyTorch around a node: the note is a list of dotted names, from the outermost to the node's own.

    The note may be anybody's, and anything.
    """
    note = node.metadata_props.get(_MODULES, "")
    if not note or len(note) > MAX_TEXT * 16:
        return ()
    try:
        names = ast.literal_eval(note)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    if not isinstance(names, list) or len(names) < 2 or not all(isinstance(name, str) for name in names):
        return ()
    # The last is the node's own name, the one before it the dotted path of the module that made it.
    return _parts(names[-2], ".")
