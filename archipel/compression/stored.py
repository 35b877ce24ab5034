"""A graph as it is in its file: not upgraded, folded or renamed, so that reports show what runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.bundle.foreign import recognize
from archipel.bundle.reader import BundleContents
from archipel.errors import ModelImportError
from archipel.graph import Model
from archipel.graph.importing.bundled import leave_out_weights, load_graph, read_weights_of
from archipel.graph.importing.loading import with_output_shapes
from archipel.library_errors import one_line

MAX_BYTES = 2**31 - 1


def read_stored(path: str | os.PathLike[str]) -> Model:
    """Read an ONNX file of any opset and domain, its external data included, to look at it or to run it.

    `Model.from_onnx` normalizes a graph. This function only infers shapes, takes weights out of the inputs, and names
    nodes without a unique name ("Conv_3"). Raises ModelImportError that names the file.
    """
    with _naming(path):
        if (foreign := recognize(path)) is not None:
            raise ModelImportError(foreign)
        if Path(path).stat().st_size > MAX_BYTES:
            raise ModelImportError(f"{Path(path).stat().st_size:,} bytes; at most {MAX_BYTES:,} can be read")
        return _as_stored(onnx.load(path, format="protobuf"))


def read_program(bundle: BundleContents, name: str, mapped: Mapping[str, np.ndarray] | None = None) -> Model:
    """As `read_stored` for a program of a bundle, with its signature. Raises ModelImportError that names the file.

    With `mapped`, arrays by name such as `bundle.tensors`, the graph's weights of these names are these arrays as they
    are, which may be mapped files or other weights: it is for looking at a graph whose weights take more than memory.
    """
    path = bundle.program_path(name)
    with _naming(path):
        proto = load_graph(bundle.folder, path.name)
        left_out = leave_out_weights(proto, mapped or {})
        read_weights_of(proto, bundle.folder)
        model = _as_stored(proto)
        _put_in(model.ir.graph, left_out, mapped or {})
    model.signature = bundle.program(name)
    return model


def _as_stored(proto: onnx.ModelProto) -> Model:
    if not proto.graph.output:
        raise ModelImportError("not an ONNX model, it has no graph outputs")
    # Again, now with external data: protobuf cannot hold more in one message.
    if proto.ByteSize() > MAX_BYTES:
        raise ModelImportError(f"{proto.ByteSize():,} bytes of weights; at most {MAX_BYTES:,} can be read")
    proto = with_output_shapes(proto)
    onnx.checker.check_model(proto)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    common.RemoveInitializersFromInputsPass()(model)
    _name_nodes(model.graph)
    return Model(model)


def _put_in(graph: ir.Graph, left_out: list[str], arrays: Mapping[str, np.ndarray]) -> None:
    inputs = {value.name: value for value in graph.inputs}
    for name in left_out:
        graph.inputs.remove(inputs[name])
        inputs[name].const_value = ir.Tensor(arrays[name], name=name)
        graph.register_initializer(inputs[name])
    for name, value in graph.initializers.items():
        array, stored = arrays.get(name), value.const_value
        if array is None or stored is None:
            continue
        if (stored.dtype.numpy(), tuple(stored.shape.numpy())) == (array.dtype, array.shape):
            value.const_value = ir.Tensor(array, name=name)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    where = os.fspath(path)
    try:
        yield
    except OSError as error:
        raise ModelImportError(f"{error.filename or where}: {error.strerror or error}") from None
    except ModelImportError as error:
        raise ModelImportError(f"{where}: {error}") from None
    except Exception as error:
        # Protobuf, the C++ checker, inference and external data each raise exceptions of their own.
        raise ModelImportError(f"{where}: not a valid ONNX file ({one_line(error)}); export it again") from error


def _name_nodes(graph: ir.Graph) -> None:
    taken: set[str] = set()
    for index, node in enumerate(graph):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{index}"
        while node.name in taken:
            node.name += "_"
        taken.add(node.name)


def fix_inputs(model: Model, values: Mapping[str, np.ndarray]) -> Model:
    """A copy in which graph inputs have become initializers with these values."""
    work = Model(model.ir.clone())
    graph = work.ir.graph
    for value in [value for value in graph.inputs if value.name in values]:
        graph.inputs.remove(value)
        value.const_value = ir.tensor(values[str(value.name)], name=value.name)
        graph.register_initializer(value)
    return work
