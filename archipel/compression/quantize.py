"""Static post-training quantization to int8, by `onnxruntime.quantization`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.functions import inline_functions
from archipel.graph.shapes import dims
from archipel.training.batch_norm import prepared

_NORMALIZATIONS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization")


@dataclass(frozen=True)
class StaticInt8:
    """int8 weights per channel, uint8 activations per tensor with MinMax ranges from calibration, in QDQ form.

    Unsigned activations with signed weights are what ONNX Runtime's x86-64 and Arm kernels are fastest with.
    `examples` of the calibration data are used, in batches of `batch_size`.
    """

    examples: int = 512
    batch_size: int = 64


def quantize_static(model: Model, recipe: StaticInt8, calibration: Mapping[str, np.ndarray]) -> Model:
    """The quantized model: the same inputs and outputs, weights as int8 initializers.

    BatchNormalization is folded into the layer before it, where there is one; other normalizations, a Gemm whose bias
    is not [columns] or is scaled, and a ConvTranspose in groups stay in float. `calibration` has an array for every
    input of the model, first axis = examples. Raises CompressionError.
    """
    from onnxruntime import quantization as ortq

    feeds = _calibration_feeds(model, recipe, calibration)
    model = prepared(model, "folded")
    inline_functions(model.ir)
    with tempfile.TemporaryDirectory(prefix="archipel-quantize-") as folder, _quiet():
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        model.save(source)
        try:
            ortq.quantize_static(
                source,
                target,
                _Reader(feeds),
                quant_format=ortq.QuantFormat.QDQ,
                per_channel=True,
                activation_type=ortq.QuantType.QUInt8,
                weight_type=ortq.QuantType.QInt8,
                calibrate_method=ortq.CalibrationMethod.MinMax,
                nodes_to_exclude=[str(node.name) for node in model.ir.graph if _stays_float(node)],
            )
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise CompressionError(f"static int8: onnxruntime.quantization failed: {error}") from error
        proto = onnx.load(target)
    weights = [tensor.name for tensor in proto.graph.initializer]
    return Model.from_proto(proto, parameters=weights)


def _stays_float(node: ir.Node) -> bool:
    """What the quantizer cannot do, or takes for something else: a scale for a weight, a shift for its bias."""
    if node.op_type == "ConvTranspose":
        return (node.attributes.get_int("group") or 1) > 1
    if node.op_type != "Gemm":
        return node.op_type in _NORMALIZATIONS
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    scaled = node.attributes.get_float("beta", 1.0) != 1.0
    return bias is not None and (scaled or dims(bias) != dims(node.outputs[0])[1:])


def _calibration_feeds(
    model: Model, recipe: StaticInt8, calibration: Mapping[str, np.ndarray]
) -> list[dict[str, np.ndarray]]:
    names = [info.name for info in model.inputs]
    missing = sorted(set(names) - set(calibration))
    if missing:
        raise CompressionError(f"static int8: calibration lacks input {missing[0]!r}; it has {sorted(calibration)}")
    count = min(recipe.examples, *(len(calibration[name]) for name in names))
    if count < 1 or recipe.batch_size < 1:
        raise CompressionError("static int8: needs at least one calibration example and batch_size >= 1")
    return [
        {name: np.asarray(calibration[name][at : min(at + recipe.batch_size, count)]) for name in names}
        for at in range(0, count, recipe.batch_size)
    ]


class _Reader:
    """The calibration data reader that `quantize_static` pulls batches from."""

    def __init__(self, feeds: list[dict[str, np.ndarray]]) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


@contextmanager
def _quiet() -> Iterator[None]:
    # The quantizer advises on the root logger to preprocess; the graph has been simplified at import.
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)
