"""Move the weights of all programs into one safetensors file, each tensor once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx

from archipel.bundle import WEIGHTS_FILE, weights_layout, write_weights
from archipel.bundle.roles import Derived
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.bodies import lower_initializers
from archipel.graph.slim import slim

# A tensor below this (a list of axes, a scale) costs less in place than entries that say where it lies in the file.
_INLINE_BYTES = 256
SOURCE = "source"
"""Stands for the graph of the model as it was converted, among those of programs."""


def share_weights(
    programs: Mapping[str, Model], parameters: Mapping[str, np.ndarray], source: Model | None = None
) -> tuple[dict[str, bytes], bytes]:
    """Serialize the programs with their weights as external data, and the weights.

    `parameters` are the global model's values, and those that state starts from. `source` becomes the graph SOURCE,
    which says what its parameters are called. Returns the graphs as ONNX bytes by name, and the bytes of
    weights.safetensors. Large initializers, parameters and derived tensors move into that file; tensors of the same
    bytes are stored once.
    """
    # These keep their names in the file, since devices and servers look them up there.
    kept = set(parameters) | derived_tensors(programs)
    protos = {name: slim(program.ir) for name, program in programs.items()}
    if source is not None:
        # Last, so that it stores nothing that a program has already.
        protos[SOURCE] = slim(source.ir, lists=True)
    tensors = {name: np.asarray(values) for name, values in parameters.items()}
    # Parameters first, so that an initializer with a parameter's bytes refers to the parameter and not to a copy.
    stored: dict[tuple[str, tuple[int, ...], bytes], str] = {_content(a): name for name, a in tensors.items()}
    places: dict[tuple[str, str], str] = {}
    for program, proto in protos.items():
        for initializer in proto.graph.initializer:
            array = onnx.numpy_helper.to_array(initializer)
            if initializer.name not in kept and array.nbytes < _INLINE_BYTES:
                continue
            content = _content(array)
            name = stored.get(content)
            # A tensor that `refresh` replaces needs its own name even where another one starts with equal bytes.
            if name is None or (initializer.name in kept and name != initializer.name):
                name = initializer.name
                # Two programs may have different tensors of one name, such as constants that a pass named.
                if name in tensors and _content(tensors[name]) != content:
                    name = f"{program}/{name}"
                tensors[name] = array
                stored.setdefault(content, name)
            places[program, initializer.name] = name
    weights = write_weights(tensors)  # only the complete file says where each tensor lies in it
    layout = weights_layout(weights, len(weights))
    for program, proto in protos.items():
        for initializer in proto.graph.initializer:
            stored_as = places.get((program, initializer.name))
            if stored_as is not None:
                place = layout[stored_as]
                _make_external(initializer, place.offset, place.nbytes)
        # A device replaces tensors by name, and finds them in the main graph only.
        lower_initializers(proto.graph, fixed=kept)
    # Deterministic, so that the same conversion gives a bundle of the same digest.
    return {program: proto.SerializeToString(deterministic=True) for program, proto in protos.items()}, weights


def derived_tensors(programs: Mapping[str, Model]) -> set[str]:
    """Names of the initializers of `predict` that `refresh` replaces."""
    ports = [port for model in programs.values() for port in model.program.outputs]
    return {port.tensor for port in ports if isinstance(port, Derived)}


def check_refresh(predict: Model, tensors: Collection[str]) -> None:
    """Raises ConversionError unless each derived tensor is an initializer of `predict`."""
    for name in tensors:
        if name not in predict.ir.graph.initializers:
            raise ConversionError(f"refresh derives {name!r}, which is not an initializer of predict")


def _content(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.name, array.shape, array.tobytes()


def _make_external(tensor: onnx.TensorProto, offset: int, length: int) -> None:
    # Cleared, because the content is in one of several fields, by its type.
    name, dims, data_type = tensor.name, list(tensor.dims), tensor.data_type
    tensor.Clear()
    tensor.name, tensor.data_type = name, data_type
    tensor.dims.extend(dims)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", WEIGHTS_FILE), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
