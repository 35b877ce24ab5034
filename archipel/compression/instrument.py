"""A graph that also returns its inner values."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from archipel.compression.matching import Reading
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.onnx_runtime import error_types, open_exact


class Instrumented:
    """Runs `model` on the CPU. Without `readings` it returns the model's outputs, fully optimized.

    With `readings` it returns those values as float arrays, and ONNX Runtime optimizes nothing, so that they exist.
    `what` names the model in errors. Raises CompressionError where ONNX Runtime cannot load the graph.
    """

    def __init__(self, model: Model, what: str, readings: Sequence[Reading] | None = None) -> None:
        self._what = what
        self._empty = readings is not None and not readings
        if self._empty:
            return
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        model = Model(model.ir)  # a CompressedModel would save its deployed form
        if readings is not None:
            model = _with_outputs(model, readings)
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        with tempfile.TemporaryDirectory(prefix="archipel-compare-") as folder:
            path = Path(folder) / "model.onnx"
            model.save(path)
            try:
                self._session = open_exact(str(path), options, enable_fallback=0)
            except error_types() as error:
                raise CompressionError(f"model {what}: ONNX Runtime cannot load it: {one_line(error)}") from None
        self._inputs = {value.name: _numpy_type(value.type) for value in self._session.get_inputs()}

    def run(self, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run on arrays by input name, or in the order of the inputs if names differ; they become the inputs' types."""
        if self._empty:
            return []
        arrays = list(feed.values())
        if set(feed) >= set(self._inputs):
            arrays = [feed[name] for name in self._inputs]
        elif len(feed) != len(self._inputs):
            raise CompressionError(
                f"model {self._what} has the inputs {', '.join(self._inputs)}, not {', '.join(feed)}"
            )
        given = {name: np.asarray(array, dtype) for (name, dtype), array in zip(self._inputs.items(), arrays)}
        try:
            answers: list[np.ndarray] = self._session.run(None, given)
        except error_types() as error:
            raise CompressionError(f"model {self._what}: ONNX Runtime cannot run it: {one_line(error)}") from None
        return answers


def _with_outputs(model: Model, readings: Sequence[Reading]) -> Model:
    work = model.copy()
    graph = work.ir.graph
    values = {value.name: value for node in graph for value in node.outputs}
    values.update(graph.initializers)
    graph.outputs.clear()
    version = graph.opset_imports.get("", 21)
    for place, reading in enumerate(readings):
        value = values[reading.value.name]
        inputs, op_type, attributes = [value], "Identity", {}
        if reading.scale is not None:
            points = [reading.scale] + ([] if reading.zero_point is None else [reading.zero_point])
            inputs, op_type = [value, *(values[point.name] for point in points)], "DequantizeLinear"
        elif value.dtype == ir.DataType.BFLOAT16:
            op_type, attributes = "Cast", {"to": int(ir.DataType.FLOAT)}
        # A new name for each, as the value may be an output of the model too.
        out = ir.Value(name=f"compared:{place}")
        out.type = ir.TensorType(value.dtype) if op_type == "Identity" and value.dtype else None
        node = ir.Node(
            "", op_type, inputs, ir.convenience.convert_attributes(attributes), outputs=[out], version=version,
            name=f"compare:{place}",
        )  # fmt: skip
        graph.append(node)
        graph.outputs.append(out)
    return work


def _numpy_type(name: str) -> np.dtype:
    plain = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(plain, plain))
