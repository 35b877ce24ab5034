"""Static quantization by `onnxruntime.quantization` alone, as its documentation says: preprocess, then quantize."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime import quantization as ortq
from onnxruntime.quantization.shape_inference import quant_pre_process

WAYS: dict[str, dict[str, Any]] = {
    f"{method}, per {per}, {activation} activations": {"method": method, "per": per, "activation": activation}
    for method, per, activation in product(
        ("MinMax", "Entropy", "Percentile"), ("tensor", "channel"), ("signed", "unsigned")
    )
}
"""The first has its defaults: QDQ, MinMax, per tensor, int8 for weights and activations."""
BATCH = 64


class _Reader(ortq.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str, examples: np.ndarray) -> None:
        self._name = name
        self._batches = iter([examples[start : start + BATCH] for start in range(0, len(examples), BATCH)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch}


def quantize(source: Path, target: Path, examples: np.ndarray, options: Mapping[str, Any]) -> None:
    """Write `source` quantized with one of WAYS' options, calibrated on `examples`, to `target`."""
    import onnx

    logging.getLogger().setLevel(logging.ERROR)  # it warns on the root logger
    cleaned = target.with_name(f"{target.stem}.preprocessed.onnx")
    quant_pre_process(source, cleaned)
    name = onnx.load(source, load_external_data=False).graph.input[0].name
    settings = {
        "calibrate_method": ortq.CalibrationMethod[options["method"]],
        "per_channel": options["per"] == "channel",
        "activation_type": ortq.QuantType.QInt8 if options["activation"] == "signed" else ortq.QuantType.QUInt8,
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        ortq.quantize_static(cleaned, target, _Reader(name, examples), **settings)
    cleaned.unlink()
