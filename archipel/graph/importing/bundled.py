"""Graphs of bundles, with the tensors that they refer to in the bundle's one file of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo

from archipel.bundle import WEIGHTS_FILE
from archipel.errors import ModelImportError
from archipel.graph.importing.sources import tensors

SMALL = 64 << 10
"""Tensors of so many bytes at most are always read: shapes may follow from them."""


def read_bundled(folder: Path, file: str) -> onnx.ModelProto:
    """A graph in a bundle's folder. Raises ModelImportError, what onnx raises, and OSError.

    onnx itself refuses weights whose file has a second name (a hard link), as in the folders that devices learn in.
    """
    proto = load_graph(folder, file)
    read_weights_of(proto, folder)
    return proto


def load_graph(folder: Path, file: str) -> onnx.ModelProto:
    """The graph without what lies in the file of weights. Raises what onnx raises, and OSError."""
    return onnx.load(folder / file, format="protobuf", load_external_data=False)


def read_weights_of(proto: onnx.ModelProto, folder: Path) -> None:
    """Read what a graph has in the bundle's file of weights. Raises ModelImportError, what onnx raises, and OSError."""
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


def leave_out_weights(proto: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Make inputs of the graph's own weights that lie in the bundle's file, are larger than SMALL, and are among the
    arrays, with the same type and shape. Returns their names; nothing takes memory for them any more."""
    names, inputs = [], {value.name for value in proto.graph.input}
    for place in reversed(range(len(proto.graph.initializer))):
        tensor = proto.graph.initializer[place]
        array = arrays.get(tensor.name)
        if (
            array is None
            or array.nbytes <= SMALL
            or tensor.data_location != onnx.TensorProto.EXTERNAL
            or array.shape != tuple(tensor.dims)
            or array.dtype != onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        ):
            continue
        names.append(tensor.name)
        if tensor.name not in inputs:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        del proto.graph.initializer[place]
    return names
