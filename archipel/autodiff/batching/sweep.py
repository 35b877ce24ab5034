"""One sweep over a graph that gives some of its inputs a lane axis, and with them everything that depends on them.

Each value of the original graph becomes one value of the new graph: *batched*, with the lanes as an additional first
axis, or the same as before. A node with a batched input is replaced by what its operator's batching rule emits; other
nodes are copied. This is the transformation of JAX's `vmap` (Frostig, Johnson, Leary, Compiling machine learning
programs via high-level tracing, 2018), on graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BATCH_RULES, SIZES, UNEVEN, BatchedResults, Shared
from archipel.autodiff.recompute import NOTHING
from archipel.errors import AutodiffError, GraphError
from archipel.graph.build import Builder
from archipel.graph.control import scan
from archipel.graph.markers import DOMAIN
from archipel.graph.shapes import dims
from archipel.graph.walk import dependencies


class Sweep:
    """Builds the part with lanes of a graph into `op`.

    Arguments:
        op: builder of the graph, or body, that new nodes go to.
        size: the number of lanes, or the name of their axis.
        count: the number of lanes, int64 [1], in the graph of `op` or one around it; None if `enter` is to read it off
            an input, or `size` says it.
        batched: value of the original graph -> value with the lanes first.
        plain: value of the original graph -> the same value in the new graph. Values in neither stand for themselves.
    """

    def __init__(
        self,
        op: Builder,
        size: int | str,
        count: ir.Value | None = None,
        batched: Mapping[ir.Value, ir.Value] | None = None,
        plain: Mapping[ir.Value, ir.Value] | None = None,
    ) -> None:
        self.op, self.size = op, size
        self._count = op.constant([size]) if count is None and isinstance(size, int) else count
        self.batched = dict(batched or {})
        self.plain = dict(plain or {})
        self._names: set[tuple[type, str]] = set()

    @property
    def count(self) -> ir.Value:
        """The number of lanes, int64 [1]."""
        if self._count is None:
            raise AutodiffError("vmap: no input has lanes, so their number is not known")
        return self._count

    def value(self, old: ir.Value) -> ir.Value:
        """The new graph's value: with the lane axis if it is batched."""
        found = self.batched.get(old)
        return self.plain.get(old, old) if found is None else found

    def inside(self, inner: Builder) -> Sweep:
        """A sweep that builds a body, whose nodes may read all values found so far."""
        return self._below(inner, self.batched, self.plain)

    def _below(self, inner: Builder, batched: Mapping[ir.Value, ir.Value], plain: Mapping[ir.Value, ir.Value]) -> Sweep:
        sweep = Sweep(inner, self.size, self.count, batched, plain)
        sweep._names = self._names
        return sweep

    def _name(self, kind: type, name: str | None) -> str | None:
        """The name of a copy: its original's. Bodies side by side may use a name twice, but may end up in one graph."""
        if not name:
            return name
        if (kind, name) in self._names:
            return self.op.unique(name)
        self._names.add((kind, name))
        return name

    def run(self, nodes: Iterable[ir.Node]) -> None:
        """Process the nodes, which are in the graph's order."""
        for node in nodes:
            if any(value in self.batched for value in dependencies(node)):
                self._batch(node)
            else:
                self.copy(node)

    def copy(self, node: ir.Node) -> list[ir.Value]:
        """Append a copy of a node, with its name, that reads the new graph's values. Returns its results."""
        inputs = [None if value is None else self.value(value) for value in node.inputs]
        results = []
        for old in node.outputs:
            self.plain[old] = new = self._like(old)
            results.append(new)
        attributes = [self._copy_attribute(attribute) for attribute in node.attributes.values()]
        self.op.graph.append(
            ir.Node(
                node.domain, node.op_type, inputs, attributes, overload=node.overload, outputs=results,
                name=self._name(ir.Node, node.name),
                doc_string=node.doc_string, metadata_props=dict(node.metadata_props),
            )
        )  # fmt: skip
        return results

    def _copy_attribute(self, attribute: ir.Attr) -> ir.Attr:
        if attribute.type == ir.AttributeType.GRAPH:
            return ir.AttrGraph(attribute.name, self.copy_body(attribute.as_graph()))
        if attribute.type == ir.AttributeType.GRAPHS:
            return ir.AttrGraphs(attribute.name, [self.copy_body(graph) for graph in attribute.as_graphs()])
        return attribute

    def copy_body(self, graph: ir.Graph) -> ir.Graph:
        """A copy of a body none of whose values is batched."""
        inner = self.inside(self.op.body(graph.name or "body"))
        inner.enter(graph)
        inner.run(graph)
        inner.op.graph.outputs.extend(inner.value(value) for value in graph.outputs)
        return inner.op.graph

    def enter(self, graph: ir.Graph, over: Collection[ir.Value] = ()) -> None:
        """Make the inputs and initializers of a graph, or of a body; those in `over` have lanes."""
        target = self.op.graph
        for old in graph.inputs:
            target.inputs.append(self._made(old, old in over))
        self.enter_initializers(graph, over)
        if self._count is None and over:
            self._count = self.op.Shape(self.batched[next(iter(over))], start=0, end=1)

    def enter_initializers(self, graph: ir.Graph, over: Collection[ir.Value] = ()) -> None:
        """Make the initializers; those in `over` hold their content once for each lane."""
        target = self.op.graph
        for old in graph.initializers.values():
            new = self.value(old) if old.is_graph_input() else self._made(old, old in over)
            new.const_value = old.const_value
            if old in over and old.const_value is not None:
                if isinstance(self.size, int):
                    content = np.repeat(old.const_value.numpy()[None], self.size, axis=0)
                    new.const_value = ir.tensor(content, dtype=old.const_value.dtype, name=old.name)
                else:
                    new.const_value = None  # an input's default, which is for one lane
                    continue
            target.register_initializer(new)

    def _made(self, old: ir.Value, lanes: bool) -> ir.Value:
        new = self._like(old)
        if lanes:
            new.shape = self.with_lanes(old)
        (self.batched if lanes else self.plain)[old] = new
        return new

    def _like(self, old: ir.Value) -> ir.Value:
        name = self._name(ir.Value, old.name)
        return ir.Value(name=name, shape=old.shape, type=old.type, metadata_props=dict(old.metadata_props))

    def with_lanes(self, old: ir.Value) -> ir.Shape | None:
        """The shape of a value, after the lanes."""
        return None if old.shape is None else ir.Shape([self.size, *dims(old)])

    def repeat(self, value: ir.Value) -> ir.Value:
        """A value of the new graph that is the same in all lanes, repeated along a new first axis."""
        known = value.shape
        result = self.op.Unsqueeze(value, [0])
        if known is not None:
            ones = [1] * len(known)
            if isinstance(self.size, int):
                target = self.op.constant(np.array([self.size, *ones], np.int64))
            else:
                target = self.op.Concat(self.count, np.array(ones, np.int64), axis=0) if ones else self.count
            result = self.op.Expand(result, target)
            result.shape = ir.Shape([self.size, *dims(value)])
            return result
        raise GraphError(f"vmap: the rank of {value.name!r} is not known; add value_info for it")

    def require_tensors(self, node: ir.Node) -> None:
        """Raise AutodiffError for a node that makes sequences or optional values."""
        for value in node.outputs:
            if value.name and value.type is not None and not isinstance(value.type, ir.TensorType):
                raise AutodiffError(
                    f"vmap: {node.op_type} {node.name!r} gives a sequence or an optional value, which has no lane "
                    "axis; replace it by a tensor (Concat, Loop with scan outputs)"
                )

    def _batch(self, node: ir.Node) -> None:
        if NOTHING in node.metadata_props:
            # 0 in every lane, and so one for all: what waits for it waits for all lanes.
            source = node.inputs[0]
            assert source is not None
            self.plain[node.outputs[0]] = self.op.Reshape(self.op.ReduceSum(self.value(source), keepdims=0), [1])
            return
        if node.domain == "":
            self._refuse_uneven(node)
        self.require_tensors(node)
        rule = BATCH_RULES.get(node.op_type) if node.domain in ("", DOMAIN) else None
        ctx = LaneContext(self, node)
        with self.op.scope(node.name or node.op_type):
            results = None if rule is None else rule(ctx)
            # A rule that does not cover a form of its operator returns nothing.
            self.define(node, results or self.one_by_one(node))

    def _refuse_uneven(self, node: ir.Node) -> None:
        where = f"vmap: {node.op_type} {node.name!r}"
        if node.op_type in UNEVEN:
            raise AutodiffError(
                f"{where}: {UNEVEN[node.op_type]} from lane to lane, so the results have different sizes; "
                "leave what decides the size out of over"
            )
        for index in SIZES.get(node.op_type, ()):
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is not None and value in self.batched:
                raise AutodiffError(
                    f"{where}: input {index} ({value.name!r}) decides the size of the result and differs "
                    "from lane to lane; leave what it depends on out of over"
                )

    def define(self, node: ir.Node, results: BatchedResults) -> None:
        """Take what a rule returned as the node's results."""
        for old, result in zip(node.outputs, results):
            if result is None:
                continue
            if isinstance(result, Shared):
                self.plain[old] = result.value
                continue
            if result.dtype is None and old.dtype is not None:
                result.dtype = old.dtype
            shape = self.with_lanes(old)
            if shape is not None and not (result.is_graph_input() or result.is_initializer()):
                if result.shape is not None and len(result.shape) != len(shape):
                    raise AutodiffError(
                        f"batching rule for {node.op_type}, node {node.name!r}: the result has shape "
                        f"{list(dims(result))}, one lane {list(dims(old))}"
                    )
                result.shape = _merged(shape, result.shape)
            self.batched[old] = result

    def one_by_one(self, node: ir.Node) -> list[ir.Value | None]:
        """The node in a Scan over the lanes: right for every operator, and as slow as a loop."""
        read = [value for value in dict.fromkeys(dependencies(node)) if value in self.batched]
        # Inference gives no type to outputs that the node leaves out.
        wanted = [i for i, value in enumerate(node.outputs) if value.uses() or value.is_graph_output()]

        def body(inner: Builder, _: list[ir.Value], items: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            lane = self._below(inner, {}, {**self.plain, **dict(zip(read, items))})
            results = lane.copy(node)
            return [], [results[i] for i in wanted]

        _, stacked = scan(self.op, body, [], [self.batched[value] for value in read], name="lane")
        results: list[ir.Value | None] = [None] * len(node.outputs)
        for i, value in zip(wanted, stacked):
            results[i] = value
        return results


def _merged(wanted: ir.Shape, found: ir.Shape | None) -> ir.Shape:
    # What inference found in numbers counts where the original graph does not know the size.
    if found is None:
        return wanted
    pairs = zip(wanted, found)
    return ir.Shape([b if isinstance(b, int) and not isinstance(a, int) and i else a for i, (a, b) in enumerate(pairs)])
