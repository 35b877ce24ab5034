"""Histograms over versions of a model's weights, and of what it computes with each of them on given examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from archipel.bundle import read_weights
from archipel.compression.instrument import Instrumented
from archipel.compression.matching import Readings
from archipel.compression.stored import fix_inputs
from archipel.errors import ArchipelError, InsightError
from archipel.graph import Model
from archipel.insight.feeding import make_feed
from archipel.insight.limits import MAX_HISTOGRAMS, MAX_VERSIONS, cut
from archipel.insight.page_data import Histogram, HistogramSeries
from archipel.insight.stored_weights import parameters_of
from archipel.insight.subjects import OpenGraph
from archipel.insight.tensor_statistics import describe

_MOST_ROWS = 256


def read_versions(files: Sequence[Path], notes: list[str]) -> list[tuple[str, Mapping[str, np.ndarray]]]:
    """(label, parameters by name) of each safetensors file, MAX_VERSIONS at most.

    A file that cannot be read is told in the notes.

    Example:
        notes = []
        versions = read_versions([Path("task.safetensors")], notes)
    """
    found = []
    for path in files[:MAX_VERSIONS]:
        try:
            arrays = read_weights(path)
        except ArchipelError as error:
            notes.append(str(error))
            continue
        found.append((cut(path.stem), parameters_of(arrays)))
    if len(files) > MAX_VERSIONS:
        notes.append(f"{len(files):,} files of weights; the first {MAX_VERSIONS:,} are shown")
    return found


def weight_histograms(versions: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> list[HistogramSeries]:
    """A series for each tensor of floating-point numbers that the versions have.

    Example:
        weights = read_weights(Path("task.safetensors").read_bytes())
        series = weight_histograms([("round 1", weights), ("round 2", weights)])
    """
    series = _series("weights", [(label, _floats(arrays)) for label, arrays in versions])
    # What has one version alone does not change over the rounds; the view of weights has it.
    return [each for each in series if len(each.steps) > 1] or series


def activation_histograms(
    graph: OpenGraph,
    versions: Sequence[tuple[str, Mapping[str, np.ndarray]]],
    examples: Mapping[str, np.ndarray],
) -> list[HistogramSeries]:
    """A series for each value that the graph computes, on the first examples, with the weights of each version.

    Arguments:
        graph: a graph that predicts.
        versions: (label, arrays by name), which replace weights of the same name and shape.
        examples: an array for each input, [examples, ...].

    Raises InsightError for examples that lack an input, CompressionError for a graph that does not run.

    Example:
        opened = read_onnx("model.onnx")
        series = activation_histograms(opened.graphs[0], [("now", opened.weights)], {"input": x})
    """
    missing = [info.name for info in graph.model.inputs if info.name not in examples and not graph.tensors]
    if missing:
        raise InsightError(f"examples: no entry {missing[0]!r}, which is an input; they have {', '.join(examples)}")
    given = {name: array[:_MOST_ROWS] for name, array in examples.items()}
    found = []
    for label, arrays in versions:
        model, feed = _with_weights(graph, arrays, given)
        readings = Readings(model).all[:MAX_HISTOGRAMS]
        answers = Instrumented(model, label, readings).run(feed)
        found.append((label, {reading.name: answer for reading, answer in zip(readings, answers)}))
    return _series("activations", found)


def _with_weights(
    graph: OpenGraph, arrays: Mapping[str, np.ndarray], examples: Mapping[str, np.ndarray]
) -> tuple[Model, dict[str, np.ndarray]]:
    """A copy of the graph with other weights and the examples as its only inputs, and what these are."""
    feed, _ = make_feed(graph.model, {**graph.tensors, **arrays}, 1, examples)
    names = {name for name in feed if name in examples}
    model = fix_inputs(graph.model, {name: array for name, array in feed.items() if name not in names})
    for name, value in model.ir.graph.initializers.items():
        new, old = arrays.get(name), value.const_value
        if new is not None and old is not None and tuple(old.shape.numpy()) == new.shape:
            value.const_value = ir.tensor(new.astype(old.dtype.numpy()), name=name)
    return model, {name: array for name, array in feed.items() if name in names}


def _floats(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if array.dtype.kind in "fV" and array.size > 1}


def _series(kind: str, versions: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> list[HistogramSeries]:
    made: dict[str, HistogramSeries] = {}
    for step, (label, arrays) in enumerate(versions):
        for name, array in arrays.items():
            if name not in made and len(made) >= MAX_HISTOGRAMS:
                continue
            series = made.setdefault(name, HistogramSeries(name=cut(name), kind=kind, steps=[]))
            series.steps.append(Histogram(step=step, label=label, statistics=describe(array)))
    return list(made.values())
