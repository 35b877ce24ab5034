"""Check a graph before anything runs it: every node, subgraph, function body and tensor, with no ONNX package.

A graph that passes reads no file but the bundle's weights and uses only standard operators and functions of its own.
Some versions of ONNX Runtime check most of this themselves and others do not, so a device does not rely on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from archipel.bundle.graphs import onnx_schema as schema
from archipel.bundle.graphs.operators import IR_VERSION, OPERATORS, OPSET
from archipel.bundle.graphs.tensors import check_tensor
from archipel.bundle.graphs.wire import Reader, Span, WireError
from archipel.errors import UnsafeGraphError

MAX_GRAPH_BYTES = 64 << 20
MAX_NODES = 500_000
"""Nodes of a graph once every call of a function is replaced by its body, as ONNX Runtime does."""
MAX_DEPTH = 16
"""Subgraphs within subgraphs, those of called functions included; types within types."""
MAX_CALL_DEPTH = 32
METADATA_PREFIX = "archipel."
_RESERVED_DOMAINS = ("ai.onnx", "com.microsoft", "com.ms", "org.pytorch")
_NONE: Span = (0, 0)

Name = tuple[str, str, str]
"""A function's domain, name and overload."""


class _Calls(NamedTuple):
    """How often a function calls another, and within how many subgraphs at most."""

    times: int
    depth: int


class _Expanded(NamedTuple):
    """A function with all that it calls: the nodes, how many calls deep it goes, and how many subgraphs deep."""

    nodes: int
    below: int
    depth: int


class _Scope(NamedTuple):
    """Where the walk is: a text for messages, the function (None in the main graph), and the depth of subgraphs."""

    where: str
    function: Name | None
    depth: int = 0


def inspect_graph(program: str, data: bytes, weights: tuple[str, int]) -> None:
    """Check the serialized ModelProto `data` of `program`.

    `weights` is the name and the size in bytes of the only file that the graph may refer to. Raises UnsafeGraphError,
    which names the program, the node, and what was expected.
    """
    where = f"program {program!r}"
    if len(data) > MAX_GRAPH_BYTES:
        raise UnsafeGraphError(f"{where}: its graph has {len(data)} bytes, the limit is {MAX_GRAPH_BYTES} (64 MiB)")
    try:
        _Walk(data, where, weights).model()
    except WireError as error:
        raise UnsafeGraphError(
            f"{where}: its graph is not what the converter writes: {error}; convert it again, or do not use this bundle"
        ) from None


class _Walk:
    def __init__(self, data: bytes, where: str, weights: tuple[str, int]) -> None:
        self._reader = Reader(data)
        self._whole = (0, len(data))
        self._where = where
        self._weights = weights
        self._functions: dict[Name, dict[str, Any]] = {}
        self._domains: set[str] = set()
        # Per function (None: the main graph): its own nodes, how many subgraphs deep they go, and which ones it calls.
        self._nodes: dict[Name | None, int] = {}
        self._depths: dict[Name | None, int] = {}
        self._calls: dict[Name | None, dict[Name, _Calls]] = {}

    def model(self) -> None:
        reader, where = self._reader, self._where
        model = reader.read(schema.MODEL, self._whole)
        if model.get("ir_version") != IR_VERSION:
            raise UnsafeGraphError(
                f"{where}: IR version {model.get('ir_version')}, expected {IR_VERSION}; convert it again"
            )
        if "graph" not in model:
            raise UnsafeGraphError(f"{where}: its file holds no graph")
        self._metadata(model, where)
        # The functions' names before any node: a node may call a function that stands later in the file.
        functions = [reader.read(schema.FUNCTION, span) for span in model.get("functions", [])]
        for function in functions:
            name = self._function_name(function)
            if name in self._functions:
                raise UnsafeGraphError(f"{where}: function {_shown(name)} is there twice")
            self._functions[name] = function
            self._domains.add(name[0])
        if not self._imports(model, where):
            raise UnsafeGraphError(f"{where}: no standard opset is imported, expected {OPSET}; convert it again")
        self._graph(model["graph"], _Scope(where, None))
        for name, function in self._functions.items():
            self._function(name, function)
        # Functions that nobody calls are counted, too: `_expanded` refuses their loops as well.
        known: dict[Name | None, _Expanded] = {}
        for caller in (None, *self._functions):
            self._expanded(caller, known, ())

    # --- functions ----------------------------------------------------------------------------------------------------

    def _function_name(self, function: dict[str, Any]) -> Name:
        domain, name, overload = (self._text(function, part) for part in ("domain", "name", "overload"))
        reserved = not domain or any(domain == each or domain.startswith(f"{each}.") for each in _RESERVED_DOMAINS)
        if reserved or not name:
            raise UnsafeGraphError(
                f"{self._where}: function {name[:64]!r} of domain {domain[:64]!r}: a function has a name, and a domain "
                "that is not ONNX's or ONNX Runtime's own"
            )
        return domain, name, overload

    def _function(self, name: Name, function: dict[str, Any]) -> None:
        where = f"{self._where}: function {_shown(name)}"
        self._imports(function, where)
        self._metadata(function, where)
        scope = _Scope(where, name)
        for span in function.get("attribute_proto", []):
            self._attribute(span, scope, where)
        for span in function.get("value_info", []):
            self._value_info(span, where)
        self._begin(scope)
        for span in function.get("node", []):
            self._node(span, scope)

    def _begin(self, scope: _Scope) -> None:
        name = scope.function
        self._nodes.setdefault(name, 0)
        self._calls.setdefault(name, {})
        self._depths[name] = max(scope.depth, self._depths.get(name, 0))

    def _expanded(
        self, name: Name | None, known: dict[Name | None, _Expanded], path: tuple[Name | None, ...]
    ) -> _Expanded:
        """A function with all that it calls, kept in `known`. `path` leads to this call."""
        # 20 functions that each call the next one three times are a small file, but 3^20 nodes once they are inlined.
        if name in path:
            raise UnsafeGraphError(f"{self._where}: function {_shown(name)} calls itself, in one step or in several")
        # ONNX Runtime's stack overflows a few thousand calls down.
        if len(path) + (known[name].below if name in known else 0) > MAX_CALL_DEPTH:
            raise UnsafeGraphError(f"{self._where}: functions call each other more than {MAX_CALL_DEPTH} deep")
        if name not in known:
            calls = self._calls[name]
            total, below, depth = self._nodes[name], 0, self._depths[name]
            for to, call in calls.items():
                called = self._expanded(to, known, (*path, name))
                total += call.times * called.nodes
                below = max(below, 1 + called.below)
                depth = max(depth, call.depth + called.depth)
            if total > MAX_NODES:
                raise UnsafeGraphError(f"{self._where}: more than {MAX_NODES} nodes, calls of functions included")
            # ONNX Runtime takes minutes and gigabytes for a few hundred subgraphs within each other.
            if depth > MAX_DEPTH:
                raise UnsafeGraphError(
                    f"{self._where}: subgraphs more than {MAX_DEPTH} deep, those of functions included"
                )
            known[name] = _Expanded(total, below, depth)
        return known[name]

    def _imports(self, owner: dict[str, Any], where: str) -> bool:
        """Whether the standard operators are among the imports."""
        seen: set[str] = set()
        for span in owner.get("opset_import", []):
            entry = self._reader.read(schema.OPSET_IMPORT, span)
            domain, version = self._text(entry, "domain"), entry.get("version", 0)
            if domain in seen:
                raise UnsafeGraphError(f"{where}: opset {domain!r} is imported twice")
            seen.add(domain)
            if domain == "" and version != OPSET:
                raise UnsafeGraphError(f"{where}: standard opset {version}, expected {OPSET}; convert it again")
            if domain and domain not in self._domains:
                raise UnsafeGraphError(
                    f"{where}: opset of domain {domain[:64]!r}, of which the graph has no function; expected standard "
                    "operators and functions of the graph's own"
                )
        return "" in seen

    # --- graphs and nodes ---------------------------------------------------------------------------------------------

    def _graph(self, span: Span, scope: _Scope) -> None:
        if scope.depth > MAX_DEPTH:
            raise UnsafeGraphError(f"{scope.where}: subgraphs more than {MAX_DEPTH} deep")
        reader, where = self._reader, scope.where
        graph = reader.read(schema.GRAPH, span)
        self._metadata(graph, where)
        self._begin(scope)
        for tensor in graph.get("initializer", []):
            self._tensor(tensor, where, "initializer")
        for part in ("input", "output", "value_info"):
            for value in graph.get(part, []):
                self._value_info(value, where)
        for node in graph.get("node", []):
            self._node(node, scope)

    def _node(self, span: Span, scope: _Scope) -> None:
        reader = self._reader
        node = reader.read(schema.NODE, span)
        op_type, domain = self._text(node, "op_type"), self._text(node, "domain")
        where = scope.where
        self._nodes[scope.function] += 1
        if domain == "":
            if op_type not in OPERATORS or "overload" in node:
                raise UnsafeGraphError(
                    f"{self._node_name(node, scope)}: {op_type[:64]!r} is not a standard operator of opset {OPSET} "
                    "that ONNX Runtime's CPU build runs; convert the model again, or do not use this bundle"
                )
        else:
            name = (domain, op_type, self._text(node, "overload"))
            if name not in self._functions:
                raise UnsafeGraphError(
                    f"{self._node_name(node, scope)}: operator {op_type[:64]!r} of domain {domain[:64]!r}; expected a "
                    "standard operator or a function of the graph's own. Do not use this bundle"
                )
            calls = self._calls[scope.function]
            times, depth = calls.get(name, (0, 0))
            calls[name] = _Calls(times + 1, max(depth, scope.depth))
        if "metadata_props" in node:
            self._metadata(node, self._node_name(node, scope))
        attributes = node.get("attribute")
        if attributes:
            where = self._node_name(node, scope)
            names = [self._attribute(attribute, scope, where) for attribute in attributes]
            if len(set(names)) != len(names):
                raise UnsafeGraphError(f"{where}: two attributes have the same name")

    def _attribute(self, span: Span, scope: _Scope, where: str) -> str:
        """Check the attribute; return its name."""
        reader = self._reader
        attribute = reader.read(schema.ATTRIBUTE, span)
        name, kind = self._text(attribute, "name"), attribute.get("type", 0)
        held = attribute.keys() - {"name", "type", "doc_string", "ref_attr_name"}
        expected = schema.ATTRIBUTE_VALUES.get(kind)
        if expected is None:
            raise UnsafeGraphError(f"{where}: attribute {name[:64]!r} is of type {kind}, which no bundle has")
        if "ref_attr_name" in attribute:
            if scope.function is None or held:
                raise UnsafeGraphError(f"{where}: attribute {name[:64]!r} refers to one of a function, outside of one")
            return name
        # The type must agree with the one field that has a value: of two values, readers could take different ones. An
        # empty list is written as no field at all.
        if held != {expected} and (held or not expected.endswith("s") or expected == "s"):
            raise UnsafeGraphError(
                f"{where}: attribute {name[:64]!r} is of type {kind} ({expected}) and has {sorted(held) or 'no value'}"
            )
        if not held:
            return name
        value = attribute[expected]
        spans = value if isinstance(value, list) else [value]
        if expected in ("t", "tensors"):
            for tensor in spans:
                self._tensor(tensor, where, f"attribute {name[:64]!r}")
        elif expected in ("g", "graphs"):
            for graph in spans:
                self._graph(graph, scope._replace(where=where, depth=scope.depth + 1))
        elif expected in ("tp", "type_protos"):
            for type_span in spans:
                self._type(type_span, where, 0)
        return name

    # --- tensors and types --------------------------------------------------------------------------------------------

    def _tensor(self, span: Span, where: str, what: str) -> None:
        tensor = self._reader.read(schema.TENSOR, span)
        here = f"{where}: {what} {self._text(tensor, 'name')[:64]!r}"
        self._metadata(tensor, here)
        check_tensor(self._reader, tensor, here, self._weights)

    def _value_info(self, span: Span, where: str) -> None:
        value = self._reader.read(schema.VALUE_INFO, span)
        self._metadata(value, where)
        if "type" in value:
            self._type(value["type"], where, 0)

    def _type(self, span: Span, where: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise UnsafeGraphError(f"{where}: types more than {MAX_DEPTH} deep")
        reader = self._reader
        fields = reader.read(schema.TYPE, span)
        kinds = fields.keys() - {"denotation"}
        if len(kinds) > 1:
            raise UnsafeGraphError(f"{where}: a type is {' and '.join(sorted(kinds))} at once")
        if "tensor_type" in fields:
            tensor = reader.read(schema.TENSOR_TYPE, fields["tensor_type"])
            for dimension in reader.read(schema.SHAPE, tensor.get("shape", _NONE)).get("dim", []):
                reader.read(schema.DIMENSION, dimension)
        for kind in kinds - {"tensor_type"}:
            element = reader.read(schema.ELEMENT_TYPE, fields[kind])
            self._type(element.get("elem_type", _NONE), where, depth + 1)

    # --- small things -------------------------------------------------------------------------------------------------

    def _metadata(self, owner: dict[str, Any], where: str) -> None:
        for span in owner.get("metadata_props", []):
            key = self._text(self._reader.read(schema.ENTRY, span), "key")
            if not key.startswith(METADATA_PREFIX):
                raise UnsafeGraphError(
                    f"{where}: metadata {key[:64]!r}, expected keys that begin with {METADATA_PREFIX!r}: runtimes may "
                    "act on others"
                )

    def _text(self, owner: dict[str, Any], field: str) -> str:
        span = owner.get(field)
        return "" if span is None else self._reader.text(span)

    def _node_name(self, node: dict[str, Any], scope: _Scope) -> str:
        name, op_type = self._text(node, "name"), self._text(node, "op_type")
        return f"{scope.where}: node {name[:64]!r} ({op_type[:64]})"


def _shown(name: Name | None) -> str:
    return "" if name is None else repr(".".join(part[:64] for part in name[:2]))
