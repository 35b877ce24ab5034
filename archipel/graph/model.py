"""Model: an ONNX graph at the internal opset with named weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from archipel.bundle.roles import Program
from archipel.errors import GraphError
from archipel.graph.importers import importer
from archipel.graph.loading import load, normalize
from archipel.graph.parameters import parameter_names
from archipel.graph.shapes import dims, dtype_of

if TYPE_CHECKING:
    import torch

_EXTERNAL_DATA_FROM = 2**31 - 2**24


@dataclass(frozen=True)
class TensorInfo:
    """A graph input or output: NumPy's name of its type, and its shape with symbolic sizes as strings."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, value: ir.Value) -> TensorInfo:
        shape = tuple("?" if d is None else d for d in dims(value))
        return cls(value.name or "", dtype_of(value).numpy().name, shape)


class Model:
    """An ONNX graph (opset 21, IR version 10), its weights, and what its inputs and outputs mean.

    `ir` is the `onnx_ir.Model`; `signature` gives the role of every input and output where the graph is a program;
    `initial` holds the values that a program's parameter inputs start from, by tensor name.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        signature: Program | None = None,
        initial: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.ir = model
        self.signature = signature
        self.initial: dict[str, np.ndarray] = dict(initial or {})

    @classmethod
    def from_onnx(cls, path: str | os.PathLike[str]) -> Model:
        """Read an ONNX file: upgraded to the internal opset, local functions inlined, shapes inferred.

        Raises ModelImportError if the file cannot be read, is not valid ONNX or cannot be upgraded.
        """
        return cls(load(path))

    @classmethod
    def from_proto(cls, proto: onnx.ModelProto, parameters: Iterable[str] | None = None) -> Model:
        """Like `from_onnx` for a model in memory. `parameters` names the initializers that are weights."""
        return cls(normalize(proto, parameters))

    @classmethod
    def from_torch(cls, module: torch.nn.Module, example: Any, dynamic_batch: bool = True) -> Model:
        """Export a PyTorch module, in evaluation mode; parameters keep their names in its `state_dict`.

        `example` is a tensor, a NumPy array or a tuple of these that the module takes; with `dynamic_batch` their
        first axis becomes the symbolic dimension "batch". The import is compared with the module on the example.
        Raises ModelImportError if the module cannot be exported or the outputs differ.
        """
        model = importer("torch")(module, example, dynamic_batch=dynamic_batch)
        if not isinstance(model, cls):
            raise GraphError(f"the torch importer returned {type(model).__name__}, not {cls.__name__}")
        return model

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(value) for value in self.ir.graph.inputs)

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(value) for value in self.ir.graph.outputs)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the weights that are initializers of the graph."""
        return parameter_names(self.ir)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The weights that are initializers of the graph, by the names they have in the source."""
        found = {}
        for name in self.parameter_names:
            tensor = self.ir.graph.initializers[name].const_value
            if tensor is None:
                raise GraphError(f"parameter {name!r} has no value")
            found[name] = tensor.numpy()
        return found

    def copy(self) -> Model:
        """An independent graph; the tensors are shared."""
        return Model(self.ir.clone(), signature=self.signature, initial=self.initial)

    def to_bytes(self) -> bytes:
        """The model as one ONNX protobuf."""
        data: bytes = ir.to_proto(self.ir).SerializeToString()
        return data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plain ONNX that any runtime opens; weights of 2 GiB and more go to `<file>.data` beside it."""
        size = sum(t.nbytes for v in self.ir.graph.initializers.values() if (t := v.const_value) is not None)
        if size < _EXTERNAL_DATA_FROM:
            ir.save(self.ir, path, format="protobuf")
        else:
            ir.save(self.ir, path, format="protobuf", external_data=os.path.basename(path) + ".data")

    def __repr__(self) -> str:
        def show(infos: tuple[TensorInfo, ...]) -> str:
            return ", ".join(f"{i.name}: {i.dtype}[{', '.join(map(str, i.shape))}]" for i in infos)

        kind = f" {self.signature.kind}" if self.signature is not None else ""
        return f"<Model{kind} ({show(self.inputs)}) -> ({show(self.outputs)}), {len(self.ir.graph)} nodes>"
