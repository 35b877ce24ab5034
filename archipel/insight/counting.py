"""Counts the nodes of an ONNX file before anything is made of it, and looks where its external data lie.

A file of some megabytes can hold a million nodes, each of which takes a kilobyte once it is read. So the bytes are
walked first, by Protocol Buffers' wire format, over what has a length and without copies. Official readers do the
reading afterwards. Format: https://protobuf.dev/programming-guides/encoding/, onnx/onnx.proto.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from archipel.errors import ModelImportError
from archipel.insight.limits import MAX_FILE_BYTES, MAX_NODES

MAX_FIELDS = 4_000_000
"""Fields that are walked over: of graphs and nodes, not of tensors."""
MAX_STRUCTURE_BYTES = 256 << 20
"""Bytes of nodes and names, without tensors."""
_MAX_DEPTH = 32

# Field numbers of onnx.proto.
_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODE, _GRAPH_TENSORS = 1, (5, 15)
_FUNCTION_NODE = 7
_NODE_ATTRIBUTE = 5
_ATTRIBUTE_GRAPHS, _ATTRIBUTE_TENSORS = (6, 11), (5, 10, 22, 23)


def check_file(path: Path) -> int:
    """Count the nodes of an ONNX file, those of bodies and functions included.

    Raises ModelImportError for more than MAX_NODES, for a file or a structure that is too large, and for bytes that
    are no protobuf; OSError.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > MAX_FILE_BYTES:
            raise ModelImportError(f"{path}: {size:,} bytes; at most {MAX_FILE_BYTES:,} can be read")
        if not size:
            raise ModelImportError(f"{path}: empty (0 bytes); copy or export it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            walk = _Walk(data, path)
            walk.model(size)
            return walk.nodes


class _Walk:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path = data, path
        self._fields = 0
        self._structure = 0
        self.nodes = 0

    def model(self, size: int) -> None:
        for number, start, stop in self._messages(0, size):
            if number == _MODEL_GRAPH:
                self._graph(start, stop, 0)
            elif number == _MODEL_FUNCTIONS:
                for inner, first, last in self._messages(start, stop):
                    if inner == _FUNCTION_NODE:
                        self._node(first, last, 0)

    def _graph(self, start: int, stop: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ModelImportError(f"{self._path}: graphs within graphs more than {_MAX_DEPTH} deep")
        for number, first, last in self._messages(start, stop):
            if number == _GRAPH_NODE:
                self._node(first, last, depth)
            elif number not in _GRAPH_TENSORS:
                self._count(last - first)

    def _node(self, start: int, stop: int, depth: int) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise ModelImportError(
                f"{self._path}: more than {MAX_NODES:,} nodes, which no page can show; look at a part of the model, "
                "such as one that onnx.utils.extract_model cuts out"
            )
        for number, first, last in self._messages(start, stop):
            if number != _NODE_ATTRIBUTE:
                self._count(last - first)
                continue
            for inner, begin, end in self._messages(first, last):
                if inner in _ATTRIBUTE_GRAPHS:
                    self._graph(begin, end, depth + 1)
                elif inner not in _ATTRIBUTE_TENSORS:
                    self._count(end - begin)

    def _count(self, size: int) -> None:
        self._structure += size
        if self._structure > MAX_STRUCTURE_BYTES:
            raise ModelImportError(
                f"{self._path}: more than {MAX_STRUCTURE_BYTES >> 20} MiB of nodes and names without the weights"
            )

    def _messages(self, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Number, begin and end of each field of the message that has a length."""
        while at < stop:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise ModelImportError(f"{self._path}: more than {MAX_FIELDS:,} fields in its graphs")
            tag, at = self._varint(at, stop)
            wire = tag & 7
            if wire == 0:
                _, at = self._varint(at, stop)
            elif wire == 1:
                at += 8
            elif wire == 5:
                at += 4
            elif wire == 2:
                size, at = self._varint(at, stop)
                if size > stop - at:
                    raise self._broken(at)
                yield tag >> 3, at, at + size
                at += size
            else:
                raise self._broken(at)
        if at != stop:
            raise self._broken(at)

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        value = shift = 0
        while at < stop and shift < 70:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise self._broken(at)

    def _broken(self, at: int) -> ModelImportError:
        return ModelImportError(f"{self._path}: not an ONNX file, at byte {at}; export it again")
