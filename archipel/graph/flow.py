"""How values get into the bodies of If, Loop and Scan, round in them and out again."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from archipel.graph.walk import bodies


@dataclass
class Flow:
    """One body of a node.

    Attributes:
        body: the body.
        entries: pairs (input of the node, input of the body).
        feedback: pairs (output of the body, input of the body that is the same in the next iteration).
        results: pairs (value of the body, result of the node); a loop's last one, or all of them stacked.
        deciding: values that decide whether or how often the body runs: of the body, or of the graph around it.
    """

    body: ir.Graph
    entries: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    feedback: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    results: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    deciding: list[ir.Value] = field(default_factory=list)


def flows(node: ir.Node) -> list[Flow]:
    """The bodies of a node; of one that is no If, Loop or Scan without entries and results."""
    if node.domain == "" and node.op_type == "If":
        condition = [value for value in node.inputs if value is not None]
        return [Flow(b, results=list(zip(b.outputs, node.outputs)), deciding=condition) for b in bodies(node)]
    if node.domain == "" and node.op_type == "Loop":
        body = node.attributes["body"].as_graph()
        states = body.inputs[2:]
        return [
            Flow(
                body,
                [(outside, inside) for outside, inside in zip(node.inputs, body.inputs) if outside is not None],
                list(zip(body.outputs, body.inputs[1:])),
                [*zip(body.outputs[1:], node.outputs), *zip(states, node.outputs)],  # without an iteration the latter
                [*(value for value in node.inputs[: len(node.inputs) - len(states)] if value), body.outputs[0]],
            )
        ]
    if node.domain == "" and node.op_type == "Scan":
        body = node.attributes["body"].as_graph()
        carried = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        return [
            Flow(
                body,
                [(outside, inside) for outside, inside in zip(node.inputs, body.inputs) if outside is not None],
                list(zip(body.outputs[:carried], body.inputs[:carried])),
                list(zip(body.outputs, node.outputs)),
            )
        ]
    return [Flow(body) for body in bodies(node)]
