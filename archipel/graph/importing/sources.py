"""Reads ONNX files from outside with limits: sizes and paths are checked before anything is loaded."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_model

from archipel.bundle.foreign import recognize
from archipel.errors import ModelImportError
from archipel.graph.walk import proto_bodies
from archipel.library_errors import one_line

MAX_BYTES = 2**31 - 1
"""Limit of one protobuf. It holds for file and external data together: checker and inference take them as one."""


def read(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Read an ONNX file and the external data beside it.

    Raises ModelImportError, before it allocates memory, for more than 2 GiB in all and for external data whose path is
    absolute, has `..`, follows a symbolic link out of the model's folder, or is no plain file.
    """
    name = os.fspath(path)
    if (foreign := recognize(path)) is not None:
        raise ModelImportError(f"{name}: {foreign}")
    if Path(path).is_dir() or Path(path).suffix == ".bundle":
        raise ModelImportError(
            f"{name}: a bundle: `archipel export` makes an ONNX file of it, "
            "archipel.converter.open_model opens it in Python, both with the publisher's key"
        )
    try:
        size = os.stat(path).st_size
        if size > MAX_BYTES:
            raise ModelImportError(
                f"{name}: has {size} bytes; a protobuf has at most {MAX_BYTES}, so this is no ONNX model, or a damaged "
                "one (larger models keep their weights in external data)"
            )
        # Without external data: its paths are checked first.
        proto = onnx.load(path, format="protobuf", load_external_data=False)
    except FileNotFoundError:
        raise ModelImportError(f"{name} does not exist") from None
    except OSError as error:
        raise ModelImportError(f"{name}: {error.strerror or error}") from None
    except ModelImportError:
        raise
    except Exception as error:
        # Each implementation of protobuf has a DecodeError of its own, so there is no one class to catch.
        raise ModelImportError(
            f"{name}: not an ONNX file, or a damaged one ({one_line(error)}); copy or export it again"
        ) from error
    _require_text(proto, name)
    external = [tensor for tensor in tensors(proto) if tensor.data_location == TensorProto.EXTERNAL]
    if external:
        folder = Path(path).parent
        _check_external(name, folder, external, size)
        try:
            load_external_data_for_model(proto, str(folder))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            raise ModelImportError(f"{name}: external data: {one_line(error)}") from error
    return proto


def refuse_external(proto: onnx.ModelProto) -> None:
    """Raise ModelImportError for a tensor whose content is in another file: a model in memory has no folder."""
    for tensor in tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            raise ModelImportError(
                f"tensor {tensor.name!r} has external data, which a model in memory cannot have; read the file with "
                "Model.from_onnx"
            )


def tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    """Every tensor of the model: initializers, sparse ones too, and attributes, in subgraphs and functions too."""
    yield from _graph_tensors(proto.graph)
    for function in proto.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _require_text(message: Message, name: str) -> None:
    """Raise ModelImportError for a text that is not UTF-8: protobuf reads it as bytes, but cannot write it again."""
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        for part in (value,) if isinstance(value, str | bytes | Message) else value:
            if isinstance(part, Message):
                _require_text(part, name)
            elif isinstance(part, bytes):
                raise ModelImportError(f"{name}: damaged: {field.full_name} is {part[:40]!r}, not UTF-8 text")


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: onnx.NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
    for graph in proto_bodies(node):
        yield from _graph_tensors(graph)


def _check_external(name: str, folder: Path, external: list[TensorProto], size: int) -> None:
    # The model's folder may itself be behind links: what counts is where both really are.
    root = folder.resolve()
    for tensor in external:
        try:
            info = ExternalDataInfo(tensor)
        except ValueError as error:
            raise ModelImportError(f"{name}: external data of {tensor.name!r}: {error}") from None
        file = _locate(name, folder, root, tensor.name, info.location)
        available = file.stat().st_size
        # Checked before anything is read: a file that is too short would otherwise show as a tensor of a wrong size.
        offset, length = info.offset or 0, info.length
        if offset > available or (length is not None and offset + length > available):
            raise ModelImportError(
                f"{name}: external data of {tensor.name!r}: bytes {offset} to {offset + (length or 0)} of "
                f"{info.location!r} are needed, it has {available}; copy the whole file"
            )
        # Tensors may share bytes of a file, but each becomes a copy in memory: every one counts.
        size += available - offset if length is None else length
        if size > MAX_BYTES:
            raise ModelImportError(
                f"{name}: the model has more than {MAX_BYTES} bytes with its external data, which is what one protobuf "
                "holds; make it smaller (float16 weights, fewer layers), or import it in parts"
            )


def _locate(name: str, folder: Path, root: Path, tensor: str, location: str) -> Path:
    where = f"{name}: external data of {tensor!r}: {location!r}"
    path = Path(location)
    # First the text alone, also for Windows' separator; links can only be checked with the file system, by resolving.
    if not location or "\0" in location or path.is_absolute() or ".." in path.parts or "\\" in location:
        raise ModelImportError(f"{where} is not a path inside the model's folder; keep the data beside the model")
    file = folder / path
    try:
        if not file.resolve().is_relative_to(root):
            raise ModelImportError(
                f"{where} is a symbolic link out of the model's folder; copy the file there in its place"
            )
        if not stat.S_ISREG(file.stat().st_mode):
            raise ModelImportError(f"{where} is no plain file")
    except FileNotFoundError:
        raise ModelImportError(f"{where} does not exist; it belongs beside the model, at {file}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle
        raise ModelImportError(f"{where}: {error}") from None
    return file
