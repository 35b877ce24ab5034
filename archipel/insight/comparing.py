"""Two models: what differs in their graphs, how far apart weights are, what both answer on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from archipel.bundle.roles import Example
from archipel.compression.compare import compare
from archipel.compression.stored import fix_inputs
from archipel.errors import ArchipelError
from archipel.graph import Model
from archipel.insight.feeding import make_feed
from archipel.insight.limits import MAX_TENSORS, cut
from archipel.insight.page_data import ComparisonData, GraphData, NodeChange, NodeData, OutputDifference, TensorDistance
from archipel.insight.subjects import OpenGraph, OpenSubject
from archipel.library_errors import one_line

EXAMPLES = 64
_MOST_CHANGES = 5_000
_BLOCK = 1 << 20


def compare_subjects(
    a: OpenSubject, b: OpenSubject, examples: Mapping[str, np.ndarray] | None = None, run: bool = True
) -> ComparisonData:
    """Compare the graphs that predict, and all weights by name.

    Arguments:
        a, b: two models, typically b made of a.
        examples: an array for each input of a, [examples, ...]; without them random numbers.
        run: also run both on the same inputs. Whoever asks for it says that the graphs may run here.

    Raises InsightError for a model without a graph. What cannot be compared is told in the notes.

    Example:
        found = compare_subjects(read_onnx("model.onnx"), read_onnx("lenet.onnx"), examples={"input": x})
    """
    first, second = a.graphs[a.main], b.graphs[b.main]
    changes, same = compare_graphs(first.data, second.data)
    found = ComparisonData(
        graph_a=a.main, graph_b=b.main, nodes=changes[:_MOST_CHANGES], same=same,
        tensors=compare_weights(a.weights, b.weights),
    )  # fmt: skip
    if len(changes) > _MOST_CHANGES:
        found.notes.append(f"{len(changes):,} nodes differ; the first {_MOST_CHANGES:,} are shown")
    if run:
        try:
            _compare_outputs(found, first, second, examples)
        except (ArchipelError, ValueError) as error:
            found.notes.append(f"values on the same inputs are not compared: {one_line(error)}")
    return found


def compare_graphs(a: GraphData, b: GraphData) -> tuple[list[NodeChange], int]:
    """Nodes that only one graph has or that differ, and how many are equal. Nodes are matched by their names."""
    in_a, in_b = ({node.name or f"#{at}": (at, node) for at, node in enumerate(graph.nodes)} for graph in (a, b))
    changes, same = [], 0
    for name, (at, node) in in_a.items():
        if name not in in_b:
            changes.append(NodeChange(kind="removed", name=name, op=node.op, a=at))
            continue
        place, other = in_b[name]
        what = _differences(a, node, b, other)
        if what:
            changes.append(NodeChange(kind="changed", name=name, op=node.op, what=what, a=at, b=place))
        else:
            same += 1
    changes += [
        NodeChange(kind="added", name=name, op=node.op, b=at) for name, (at, node) in in_b.items() if name not in in_a
    ]
    return changes, same


def _differences(a: GraphData, first: NodeData, b: GraphData, second: NodeData) -> list[str]:
    told = []
    if (first.op, first.domain) != (second.op, second.domain):
        told.append(f"operator {first.op} became {second.op}")
    old, new = ({name: text for name, _, text in node.attributes} for node in (first, second))
    told += [f"{name}: {old.get(name, 'none')} became {new.get(name, 'none')}" for name in sorted({*old, *new})
             if old.get(name) != new.get(name)]  # fmt: skip
    for what, places in (("reads", ("inputs", first.inputs, second.inputs)),
                         ("gives", ("outputs", first.outputs, second.outputs))):  # fmt: skip
        names = [[graph.values[at].name if at >= 0 else "" for at in each] for graph, each in
                 ((a, places[1]), (b, places[2]))]  # fmt: skip
        if names[0] != names[1]:
            told.append(f"{what} {', '.join(names[1])}, before {', '.join(names[0])}")
        else:
            shapes = [[graph.values[at].shape for at in each if at >= 0] for graph, each in
                      ((a, places[1]), (b, places[2]))]  # fmt: skip
            if shapes[0] != shapes[1]:
                told.append(f"other shapes of {places[0]}")
    return [cut(text) for text in told[:20]]


def compare_weights(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[TensorDistance]:
    """The distance of each tensor by name; the farthest first, then what only one has."""
    rows = []
    for name in list(dict.fromkeys([*a, *b]))[:MAX_TENSORS]:
        first, second = a.get(name), b.get(name)
        row = TensorDistance(name=cut(name))
        if first is not None:
            row.shape_a, row.bytes_a = list(first.shape), first.nbytes
        if second is not None:
            row.shape_b, row.bytes_b = list(second.shape), second.nbytes
        if first is None or second is None:
            row.what = "only in one of the two"
        elif first.shape != second.shape:
            row.what = "other shapes"
        elif {first.dtype.kind, second.dtype.kind} - set("fiubV"):
            row.what = "no numbers"
        else:
            _measure(row, first.reshape(-1), second.reshape(-1))
            if first.dtype != second.dtype:
                row.what = f"{first.dtype.name} and {second.dtype.name}"
        rows.append(row)
    return sorted(rows, key=lambda row: -1.0 if row.distance is None else row.distance, reverse=True)


def _measure(row: TensorDistance, a: np.ndarray, b: np.ndarray) -> None:
    # Block by block: two tensors and their difference as float64 may be more than memory.
    squares = np.zeros(4)
    largest = 0.0
    with np.errstate(all="ignore"):
        for begin in range(0, a.size, _BLOCK):
            first, second = (each[begin : begin + _BLOCK].astype(np.float64) for each in (a, b))
            apart = first - second
            squares += apart @ apart, first @ first, second @ second, first @ second
            largest = max(largest, float(np.abs(apart).max()))
        distance, norm, other = np.sqrt(squares[:3]).tolist()
        row.distance = _finite(distance)
        row.relative = _finite(distance / norm) if norm else None
        row.cosine = _finite(float(squares[3]) / (norm * other)) if norm and other else None
        row.largest = _finite(largest) if row.distance is not None else None
    if row.distance is None:
        row.what = "numbers that are not finite"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _compare_outputs(
    found: ComparisonData, a: OpenGraph, b: OpenGraph, examples: Mapping[str, np.ndarray] | None
) -> None:
    feed, told = make_feed(a.model, a.tensors, EXAMPLES, examples)
    found.assumed = told
    result = compare(_predicting(a), _predicting(b), {name: feed[name] for name in _examples_of(a.model)})
    found.examples = result.examples
    for row in result.rows:
        finite = row.snr_db is not None and math.isfinite(row.snr_db)
        found.outputs.append(
            OutputDifference(
                name=cut(row.name), counterpart=cut(row.counterpart), layer=cut(row.layer), output=row.output,
                cosine=None if row.cosine is None else _finite(row.cosine), snr_db=row.snr_db if finite else None,
                equal=row.snr_db == math.inf, largest=None if row.largest is None else _finite(row.largest),
                what=cut(row.reason),
            )
        )  # fmt: skip
    if result.agreement is not None:
        found.notes.append(f"the same class for {result.agreement:.2%} of {result.examples} examples")
    if result.unmatched:
        found.notes.append(f"{len(result.unmatched)} values of the first model have no counterpart in the second")


def _examples_of(model: Model) -> list[str]:
    if model.signature is None:
        return [info.name for info in model.inputs]
    return [port.name for port in model.signature.inputs if isinstance(port, Example)]


def _predicting(graph: OpenGraph) -> Model:
    """The graph with its examples as the only inputs."""
    names = _examples_of(graph.model)
    feed, _ = make_feed(graph.model, graph.tensors, 1)
    return fix_inputs(graph.model, {name: array for name, array in feed.items() if name not in names})
