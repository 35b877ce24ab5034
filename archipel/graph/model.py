"""Model: an ONNX graph at the internal opset with named weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from archipel.bundle.roles import Program, ProgramKind
from archipel.errors import GraphError
from archipel.graph.loading import normalize
from archipel.graph.onnx_import import load
from archipel.graph.parameters import parameter_names
from archipel.graph.report import ImportReport
from archipel.graph.shapes import dims, dtype_of
from archipel.importer_registry import find_importer

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
    def from_onnx(cls, path: str | os.PathLike[str], dynamic_batch: bool = True) -> Model:
        """Read an ONNX file of opset 7 or above, from any tool.

        It is upgraded to the internal opset, local functions inlined, shapes inferred; what exporters leave behind is
        cleaned up (shapes computed in the graph, Identity, weights behind a Reshape, float16). With `dynamic_batch` a
        first axis of 1 that all inputs have becomes the symbolic dimension "batch", where that can be shown to be
        right. File and import run in ONNX Runtime on sample inputs and are compared; `import_report` says what was
        found. A file that `save` wrote is only read.

        Raises ModelImportError if the file cannot be read, is not valid ONNX, uses what is not standard ONNX, cannot
        be upgraded, or if the import differs.
        """
        return cls(load(path, dynamic_batch))

    @classmethod
    def from_proto(cls, proto: onnx.ModelProto, parameters: Iterable[str] | None = None) -> Model:
        """Bring a model in memory to the internal opset, with shapes inferred; nothing is cleaned up or compared.

        `parameters` names the initializers that are weights. Raises ModelImportError.
        """
        return cls(normalize(proto, parameters))

    @classmethod
    def from_torch(
        cls,
        source: torch.nn.Module | torch.export.ExportedProgram | str | os.PathLike[str],
        example: Any = None,
        dynamic_batch: bool = True,
    ) -> Model:
        """Export a PyTorch module, or a program of `torch.export` (the object, or the path of a .pt2 file).

        Either comes in evaluation mode, with Dropout and BatchNormalization in the graph; parameters keep their names
        in the `state_dict`. `example` is a tensor, a NumPy array or a tuple of these that the module takes; programs
        have their own. With `dynamic_batch` the first axis of the inputs becomes the symbolic dimension "batch"; a
        program for which that cannot be done keeps its size, and `import_report` says why. The import is compared with
        the source on the example and on noise of its shape. A .pt2 file is a program: open those you trust.

        Raises ModelImportError if the source cannot be read or exported, or the outputs differ.
        """
        return cls._imported("torch", source, example, dynamic_batch=dynamic_batch)

    @classmethod
    def from_sklearn(cls, estimator: Any, example: Any) -> Model:
        """Convert a fitted scikit-learn estimator or pipeline into standard operators.

        `example` is [examples, features], numbers. The input is "input", float32 [batch, features]. A classifier has
        the outputs "logits" and "probabilities", [batch, classes] in the order of its `classes_`, or "scores" where it
        knows no probabilities; anything else has "output", [batch, targets]. Weights of linear layers are parameters.
        The import is compared with the estimator on the example and on numbers like it.

        Raises ModelImportError for an estimator that has no such form (trees, kernels), and if the answers differ.
        """
        return cls._imported("sklearn", estimator, example)

    @classmethod
    def _imported(cls, kind: str, *arguments: Any, **options: Any) -> Model:
        model = find_importer(kind)(*arguments, **options)
        if not isinstance(model, cls):
            raise GraphError(f"the {kind} importer returned {type(model).__name__}, not {cls.__name__}")
        return model

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(value) for value in self.ir.graph.inputs)

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(value) for value in self.ir.graph.outputs)

    @property
    def program(self) -> Program:
        """The signature, of a model that is a program. Raises GraphError for one that is none."""
        if self.signature is None:
            raise GraphError(
                f"{self!r} has no signature, so it is no program; step_graph, evaluate_graph and convert make programs"
            )
        return self.signature

    @property
    def kind(self) -> ProgramKind | None:
        """What kind of program the model is; None where it is none."""
        return None if self.signature is None else self.signature.kind

    @property
    def steps(self) -> int:
        """How many optimizer steps one run makes; 1 where the model is no program."""
        return 1 if self.signature is None else self.signature.steps

    @property
    def import_report(self) -> ImportReport | None:
        """Where the model came from and how close to it it is; None for one that no importer made."""
        return ImportReport.of(self.ir)

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

        kind = f" {self.kind}" if self.kind else ""
        return f"<Model{kind} ({show(self.inputs)}) -> ({show(self.outputs)}), {len(self.ir.graph)} nodes>"
