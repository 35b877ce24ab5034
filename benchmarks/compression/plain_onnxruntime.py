"""Static quantization by `onnxruntime.quantization` alone, as its documentation says: preprocess, then quantize."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime import quantization as ortq
from onnxruntime.quantization.shape_inference import quant_pre_process

WAYS: dict[str, dict[str, Any]] = {
    "per tensor": {"per_channel": False},
    "per channel": {"per_channel": True},
    "per channel, unsigned activations": {"per_channel": True, "activation_type": ortq.QuantType.QUInt8},
}
"""QDQ, MinMax and int8 for both are its defaults."""
BATCH = 64


class _Reader(ortq.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str, examples: np.ndarray) -> None:
        self._name = name
        self._batches = iter([examples[start : start + BATCH] for start in range(0, len(examples), BATCH)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch}


def quantize(source: Path, target: Path, examples: np.ndarray, way: str) -> None:
    """Write `source` quantized in one of WAYS, calibrated on `examples`, to `target`."""
    import onnx

    logging.getLogger().setLevel(logging.ERROR)  # it warns on the root logger
    cleaned = target.with_suffix(".preprocessed.onnx")
    quant_pre_process(source, cleaned)
    name = onnx.load(source, load_external_data=False).graph.input[0].name
    ortq.quantize_static(cleaned, target, _Reader(name, examples), **WAYS[way])
    cleaned.unlink()
