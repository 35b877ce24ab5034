"""A graph's nodes as the body of a loop: over minibatches, or over the examples of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
import onnx_ir as ir

from archipel.bundle.roles import (
    Example,
    ExampleWeight,
    Feature,
    Label,
    Metric,
    Noise,
    Parameter,
    Personal,
    Port,
    Program,
    State,
    Step,
)
from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.control import scan
from archipel.graph.model import Model, TensorInfo
from archipel.graph.shapes import dims
from archipel.graph.walk import dependents

P = TypeVar("P", bound=Port)

MOVING = (Parameter, Personal, State)
PER_MINIBATCH = (Example, Label, ExampleWeight, Feature, Noise)


def enclose(
    inner: Builder, graph: ir.Graph, stand_ins: Mapping[ir.Value, ir.Value], also: Iterable[ir.Value] = ()
) -> None:
    """Move into the body the nodes that depend on the keys of `stand_ins`, which read the values there instead.

    Nodes that depend on `also` move too. All others stay outside, and run once and not in every iteration."""
    nodes = list(dependents(graph, {*stand_ins, *also}))
    graph.remove(nodes)
    for outside, inside in stand_ins.items():
        for use in list(outside.uses()):
            if use.node.graph is not inner.graph:  # nodes that are in the body already make the stand-ins
                use.node.replace_input_with(use.idx, inside)
    inner.graph.extend(nodes)


def repeat(program: Model, steps: int) -> Model:
    """Make of a train program of one minibatch one of `steps` minibatches, as a Scan. Changes the program's graph.

    Fields, noise and metrics get a first axis of `steps`. Parameters and state go from one minibatch to the next inside
    the graph.
    """
    if program.kind != "train" or program.steps != 1:
        raise TrainingError("repeat: expected a train program of one minibatch")
    signature = program.program
    graph = program.ir.graph
    op = Builder(graph)
    inputs = dict(zip(graph.inputs, signature.inputs))
    results = list(zip(graph.outputs, signature.outputs))
    graph.outputs.clear()
    # An input and an output belong together by role and tensor. Inputs that are never written stay outside the loop.
    written = {_key(p): value for value, p in results if isinstance(p, MOVING)}
    before = [value for value, p in inputs.items() if isinstance(p, MOVING) and _key(p) in written]
    # The number of the step is carried too, and counted up inside: the runtime gives that of the first.
    number = next((value for value, p in inputs.items() if isinstance(p, Step)), None)
    carried = [*before, *([number] if number is not None else [])]
    sequences = [value for value, p in inputs.items() if isinstance(p, PER_MINIBATCH)]
    for value in sequences:
        value.shape = ir.Shape([steps, *dims(value)])
    metrics = [value for value, p in results if isinstance(p, Metric)]

    def body(inner: Builder, states: list[ir.Value], items: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        enclose(inner, graph, dict(zip([*carried, *sequences], [*states, *items])))
        following = [written[_key(inputs[value])] for value in before]
        if number is not None:
            following.append(inner.Add(states[-1], 1))
        return following, metrics

    moved, emitted = scan(op, body, carried, sequences, name="minibatch")
    after = dict(zip((_key(inputs[value]) for value in before), moved))
    rows = iter(emitted)  # outputs are named in the order of the signature, in which metrics and tensors mix
    for _, port in results:
        op.name_output(next(rows) if isinstance(port, Metric) else after[_key(port)], port.name)
    signature = Program(
        kind="train",
        inputs=tuple(_reshaped(port, value) for value, port in inputs.items()),
        outputs=tuple(_reshaped(port, value) for value, (_, port) in zip(graph.outputs, results)),
        steps=steps,
    )
    return Model(program.ir, signature=signature, initial=program.initial)


def _key(port: Port) -> tuple[type[Port], str]:
    return type(port), getattr(port, "tensor", port.name)


def _reshaped(port: P, value: ir.Value) -> P:
    return msgspec.structs.replace(port, shape=TensorInfo.of(value).shape)
