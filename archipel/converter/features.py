"""Split a frozen backbone off the train programs, so that a device runs it once for each example.

The new program `features` computes the values that are the same for an example in every step: they depend on `example`
inputs and constants alone and have a row for each example (`frozen.proof`). A minimum cut says where it ends. The cut
weighs the cost of keeping a result against the cost of computing it in every step (`frozen.cost`), so it lies behind a
pooling rather than before it, behind an activation, and before a result is enlarged or cut into patches for a gradient.

The split is made only where it saves at least MIN_SHARE of the steps' FLOPs, and at least KEPT_BYTE of them for each
byte kept of an example: scaling an input or looking up tokens is cheaper than fetching the stored result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import onnx_ir as ir

from archipel.bundle.roles import Example, Feature, Input
from archipel.converter.frozen.computations import Frozen, Result
from archipel.converter.frozen.cost import KEPT_BYTE, kept_bytes, row_bytes, step_cost
from archipel.converter.frozen.min_cut import source_side
from archipel.converter.frozen.proof import batch_axes
from archipel.converter.frozen.rows import BatchAxes
from archipel.converter.frozen.sizes import fold_sizes
from archipel.converter.limits import flops_per_run
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.build import Builder
from archipel.graph.parameters import parameter_names
from archipel.graph.passes import remove_dead_code
from archipel.graph.walk import computable_values, dependencies
from archipel.training.assembly import port

FEATURES = "features"
MIN_SHARE = 0.1

_NEVER = 1 << 60  # the cost of an edge that must not be cut: above all real costs together


def split_features(programs: Mapping[str, Model]) -> dict[str, Model]:
    """The programs with `features` before the first train program, and train programs that read its outputs.

    Train programs must be of one step. Their inputs of role `feature` come first, then those of their own inputs that
    they still need, in the old order; they compute the same numbers. Where no split is worth it, all programs come back
    unchanged. The arguments are never changed. Raises ConversionError.
    """
    trains = {name: program for name, program in programs.items() if program.kind == "train"}
    for name, program in trains.items():
        if program.steps > 1:
            raise ConversionError(f"program {name!r} makes {program.steps} steps; split features before that")
    if trains and FEATURES in programs:
        raise ConversionError(f"there is a program called {FEATURES!r} already; split features once")
    frozen = Frozen()  # one `Frozen` for all train programs: what two of them compute alike becomes one feature
    parts = {name: _Part(program, frozen) for name, program in trains.items()}
    kept = _cut(frozen, {result for part in parts.values() for result in part.needed_results()})
    if not kept:
        return dict(programs)
    names = _names(frozen, kept)
    features = frozen.program(names)
    split = {name: part.without(names) for name, part in parts.items()}
    if not _worth_it(trains, split, frozen, kept):
        return dict(programs)
    result: dict[str, Model] = {}
    for name, program in programs.items():
        if name in trains and FEATURES not in result:
            result[FEATURES] = features
        result[name] = split.get(name, program)
    return result


class _Part:
    """A copy of a train program, with those of its values that are results of frozen computations."""

    def __init__(self, program: Model, frozen: Frozen) -> None:
        self._program = program.copy()
        self._graph = self._program.ir.graph
        self._op = Builder(self._graph)
        self._signature = program.program
        self._frozen = frozen
        ports = dict(zip(self._graph.inputs, self._signature.inputs))
        # Only fields with the first field's batch axis: a scalar, or a field of another size, has no row per example.
        batch = next((port.shape[:1] for port in ports.values() if isinstance(port, Example)), ())
        self._examples = [v for v, p in ports.items() if isinstance(p, Example) and p.shape[:1] == batch != ()]
        self._results: dict[ir.Value, Result] = {}
        if self._examples:
            # Sizes before rows: a step that reads the Shape of a value deep in the backbone would need that value.
            self._sizes = fold_sizes(self._op, self._examples[0], _constant_or_from(self._graph, self._examples))
            remove_dead_code(self._program.ir)
            axes = batch_axes(self._graph, self._examples, self._sizes)
            self._register(axes)
        frozen.weights.update(parameter_names(self._program.ir))

    def _register(self, axes: BatchAxes) -> None:
        frozen, known = self._frozen, {*axes.rows, *axes.fixed, *self._sizes}
        for value in self._examples:
            self._results[value] = frozen.start(value)
        for node in self._graph:
            # `features` can make a node only if it can make all inputs of it.
            if not any(value in known for value in node.outputs) or any(
                value is not None and value not in known for value in node.inputs
            ):
                continue
            number = frozen.apply(node, tuple(None if v is None else self._result(v) for v in node.inputs))
            self._results.update({v: Result(number, i) for i, v in enumerate(node.outputs) if v in known})
        frozen.rows.update({self._results[value]: rows for value, rows in axes.rows.items()})

    def _result(self, value: ir.Value) -> Result:
        if value not in self._results:
            self._results[value] = self._frozen.start(value)
        return self._results[value]

    def needed_results(self) -> set[Result]:
        """The results with rows that the rest of the program reads."""
        rows = {value: result for value, result in self._results.items() if result in self._frozen.rows}
        results = {rows[value] for value in self._graph.outputs if value in rows}
        for node in self._graph:
            # A node that makes something of its own belongs to the rest; outputs that nobody reads do not count.
            if any(v.name and v not in self._results and (v.is_graph_output() or list(v.uses())) for v in node.outputs):
                results.update(rows[value] for value in dependencies(node) if value in rows)
        return results

    def without(self, names: Mapping[Result, str]) -> Model:
        """The program that reads the results in `names` as inputs of these names instead of computing them."""
        graph, ports = self._graph, dict(zip(self._graph.inputs, self._signature.inputs))
        fields: dict[Result, ir.Value] = {}
        for value, result in self._results.items():
            if result not in names or value.is_graph_input():
                continue
            if result not in fields:  # two values of the graph may be one result, which is then one input
                self._op.free_name(names[result])
                source = self._frozen.value(result)
                fields[result] = ir.Value(name=names[result], type=source.type, shape=source.shape)
            value.replace_all_uses_with(fields[result], replace_graph_outputs=True)
        graph.inputs.extend(fields.values())
        # Without the backbone some examples, and features that only it read, have no reader left.
        remove_dead_code(self._program.ir)
        used = [field for field in fields.values() if list(field.uses())]
        for value in self._examples:
            # Where a step reads no more of an example than its number of rows, any feature has that too.
            if used and all(use.node.outputs[0] in self._sizes for use in value.uses()):
                value.replace_all_uses_with(used[0])
        before = [value for value in ports if value not in self._examples or list(value.uses())]
        graph.inputs.clear()
        graph.inputs.extend([*used, *before])
        features: list[Input] = [port(Feature, field) for field in used]
        signature = msgspec.structs.replace(self._signature, inputs=(*features, *(ports[value] for value in before)))
        return Model(self._program.ir, signature=signature, initial=self._program.initial)


def _constant_or_from(graph: ir.Graph, examples: list[ir.Value]) -> set[ir.Value]:
    """The values that depend on the examples and constants and on nothing else."""
    return computable_values(graph, [*examples, *(v for v in graph.initializers.values() if not v.is_graph_input())])


def _cut(frozen: Frozen, read: set[Result]) -> list[Result]:
    """The results to keep so that the steps have what they `read`, without the examples themselves."""
    side = source_side(_edges(frozen, read), "source", "sink")
    # The cut goes between a kept result, which the steps need, and its computation, which they do not make.
    return [
        result
        for result in frozen.rows
        if result in side and result.computation not in side and frozen.is_computed(result)
    ]


def _edges(frozen: Frozen, read: set[Result]) -> Iterator[tuple[object, object, int]]:
    # On the source's side lie the results that the steps need and, by number, the computations that they make
    # themselves. Cutting result -> computation keeps the result; cutting computation -> sink makes it in every step.
    for result in read:
        yield "source", result, _NEVER
    numbers = set()
    for result in frozen.rows:
        keep = kept_bytes(frozen, result)
        cost = _NEVER if keep is None else keep * KEPT_BYTE
        # An example as it comes has no computation: steps that need it pay for keeping it.
        yield (result, result.computation if frozen.is_computed(result) else "sink", cost)
        numbers.add(result.computation)
    for number in numbers:
        if frozen.computations[number].node is None:
            continue
        # Steps that make a computation need its inputs; constants are in the program anyway.
        for needed in frozen.computations[number].inputs:
            if needed is not None and needed in frozen.rows:
                yield number, needed, _NEVER
        yield number, "sink", step_cost(frozen, number)


def _names(frozen: Frozen, kept: list[Result]) -> dict[Result, str]:
    names: dict[Result, str] = {}
    for result in kept:
        # A manifest's names have at most 256 characters; 200 leave room for the number.
        base = name = f"{FEATURES}/{str(frozen.value(result).name).strip('/')}"[:200]
        count = 1
        while name in names.values():
            count += 1
            name = f"{base}_{count}"
        names[result] = name
    return names


def _worth_it(before: Mapping[str, Model], after: Mapping[str, Model], frozen: Frozen, kept: list[Result]) -> bool:
    # All for one run: the kept bytes of a fixed batch are those of all its examples.
    total = sum(map(flops_per_run, before.values()))
    saved = total - sum(map(flops_per_run, after.values()))
    stored = sum(row_bytes(frozen.value(result)) for result in kept)
    return saved >= max(1, MIN_SHARE * total) and saved >= KEPT_BYTE * stored
