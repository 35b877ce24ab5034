"""Parts of a graph as model-local functions, in whose place a runtime may run kernels of its own.

A node of the domain `archipel.kernels` has a body of standard operators. ONNX Runtime inlines the body when it opens
the file; where the kernel pack (`archipel[kernels]`) is installed and registered, its operator of that domain and name
runs instead and gives the same within float32's rounding. So one file runs everywhere, faster where there is a pack.

The same operator has another body for each shape and attribute: ONNX tells them apart by the function's `overload`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from archipel.bundle.graphs.operators import KERNELS_DOMAIN
from archipel.graph.build import Builder
from archipel.graph.opset import OPSET
from archipel.graph.passes import optimize
from archipel.graph.shapes import dims, dtype_of

Body = Callable[..., Sequence[ir.Value]]
"""Emits standard operators: body(op, *inputs) gives the results."""


def outline(
    op: Builder, name: str, inputs: Sequence[ir.Value | None], body: Body, **attributes: int | float | Sequence[int]
) -> tuple[ir.Value, ...]:
    """What `body(op, *inputs)` emits; as one node `archipel.kernels.<name>` where the builder keeps outlined parts.

    Arguments:
        op: the builder.
        name: of the operator.
        inputs: values of the graph; None is an optional one at the end that is left out.
        body: emits the results from a builder and the inputs; it may read nothing else of the graph.
        attributes: what a kernel has to know besides the shapes of its inputs.
    """
    return tuple(body(op, *inputs)) if op.outlined is None else op.outlined.call(op, name, inputs, body, attributes)


class Functions:
    """The outlined parts of one model: set it as a builder's `outlined`, and call `define` when the graph is complete.

    Example:
        op.outlined = functions = Functions()
        (y,) = outline(op, "Conv", [x, w], lambda op, x, w: [op.Conv(x, w)], strides=[1, 1])
        functions.define(model)
    """

    def __init__(self) -> None:
        self._bodies: dict[tuple[object, ...], ir.Function] = {}

    def call(
        self,
        op: Builder,
        name: str,
        inputs: Sequence[ir.Value | None],
        body: Body,
        attributes: Mapping[str, int | float | Sequence[int]],
    ) -> tuple[ir.Value, ...]:
        """Emit the node; equal calls share a function."""
        shapes = tuple(None if value is None else (dtype_of(value), *dims(value)) for value in inputs)
        key = (name, shapes, str(sorted(attributes.items())))
        given = list(ir.convenience.convert_attributes(dict(attributes)))
        if key not in self._bodies:
            self._bodies[key] = _function(name, str(len(self._bodies)), inputs, body, given)
        function = self._bodies[key]
        title = op.title(name)
        results = [
            ir.Value(name=title if i == 0 else op.unique(f"{title}:{i}"), type=inner.type, shape=inner.shape)
            for i, inner in enumerate(function.outputs)
        ]
        present = [value for value in inputs if value is not None]
        op.insert(
            ir.Node(KERNELS_DOMAIN, name, present, given, overload=function.overload, outputs=results, name=title)
        )
        return tuple(results)

    def define(self, model: ir.Model) -> None:
        """Give the model the functions that its nodes call."""
        called = {node.op_identifier() for node in model.graph.all_nodes() if node.domain == KERNELS_DOMAIN}
        for function in self._bodies.values():
            if function.identifier() in called:
                model.functions[function.identifier()] = function
        if called:
            model.opset_imports[KERNELS_DOMAIN] = 1


def _function(
    name: str, overload: str, inputs: Sequence[ir.Value | None], body: Body, attributes: Sequence[ir.Attr]
) -> ir.Function:
    graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": OPSET})
    op = Builder(graph)
    stand_ins = [None if value is None else _like(op, f"input_{index}", value) for index, value in enumerate(inputs)]
    for index, result in enumerate(body(op, *stand_ins)):
        op.name_output(result, f"output_{index}")
    optimize(ir.Model(graph, ir_version=10))
    # A function has no initializers. ONNX Runtime makes some of these nodes again when it inlines the function.
    first = graph[0]
    for value in list(graph.initializers.values()):
        content = value.const_value
        assert content is not None  # the builder gives each one its value
        constant = ir.Node("", "Constant", [], [ir.AttrTensor("value", content)], name=f"{value.name}/Constant")
        made = constant.outputs[0]
        made.name, made.type, made.shape = f"{value.name}/value", value.type, value.shape
        value.replace_all_uses_with(made)
        graph.insert_before(first, constant)
    graph.initializers.clear()
    # Names of attributes without a default, which is what the nodes set.
    declared = [ir.Attr(each.name, each.type, None) for each in attributes]
    return ir.Function(KERNELS_DOMAIN, name, overload, graph=graph, attributes=declared)


def _like(op: Builder, name: str, value: ir.Value) -> ir.Value:
    result = op.input(name, dtype_of(value), [])
    result.shape = value.shape
    return result
