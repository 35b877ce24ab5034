"""Graphs of bundles, with the tensors that they refer to in the bundle's one file of weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo

from archipel.bundle import WEIGHTS_FILE
from archipel.errors import ModelImportError
from archipel.graph.importing.sources import tensors


def read_bundled(folder: Path, file: str) -> onnx.ModelProto:
    """A graph in a bundle's folder. Raises ModelImportError, what onnx raises, and OSError.

    onnx itself refuses weights whose file has a second name (a hard link), as in the folders that devices learn in.
    """
    proto = onnx.load(folder / file, format="protobuf", load_external_data=False)
    external = [tensor for tensor in tensors(proto) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    stored = np.memmap(folder / WEIGHTS_FILE, np.uint8, "r") if external else np.zeros(0, np.uint8)
    for tensor in external:
        place = ExternalDataInfo(tensor)
        start, length = place.offset or 0, place.length or 0
        if place.location != WEIGHTS_FILE or not 0 <= start <= start + length <= len(stored):
            raise ModelImportError(f"the place of tensor {tensor.name!r} is not within {WEIGHTS_FILE}")
        tensor.raw_data = stored[start : start + length].tobytes()
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
    return proto
