"""`Model`: an ONNX graph at the internal opset with named weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import ArrayLike

from archipel.bundle.roles import Program, ProgramKind
from archipel.durable import publish, sync_tree, temporary_folder, write_durably
from archipel.errors import GraphError
from archipel.graph.bodies import lower_initializers, make_scans_plain
from archipel.graph.fixing import fix
from archipel.graph.functions import inline_functions
from archipel.graph.importing.loading import normalize
from archipel.graph.importing.onnx_import import load
from archipel.graph.loops import limit_loops
from archipel.graph.parameters import parameter_names
from archipel.graph.report import ImportReport
from archipel.graph.shapes import dims, dtype_of
from archipel.importer_registry import find_importer

if TYPE_CHECKING:
    import torch

_EXTERNAL_DATA_FROM = 2**31 - 2**24  # bytes of weights; leaves room for the graph below protobuf's limit of 2 GiB


@dataclass(frozen=True)
class TensorInfo:
    """A graph input or output: NumPy's name of its type, and its shape, with names for symbolic sizes.

    Example:
        [input] = model.inputs
        print(input.name, input.dtype, input.shape)  # input float32 ('batch', 4)
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, value: ir.Value) -> TensorInfo:
        """That of a value of a graph; "?" stands for a size without a name."""
        shape = tuple("?" if d is None else d for d in dims(value))
        return cls(value.name or "", dtype_of(value).numpy().name, shape)


class Model:
    """An ONNX graph (opset 21, IR version 10), its weights, and the roles of its inputs and outputs.

    Attributes:
        ir: the `onnx_ir.Model`.
        signature: the role of every input and output, if the graph is a program of a bundle; else None.
        initial: values that a program's parameter inputs start from, by tensor name.

    Example:
        model = archipel.Model.from_onnx("lenet.onnx")
        print(model, model.parameter_names)
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
        """Read an ONNX file of opset 7 or above, from any tool, and compare the import with it.

        The import converts the file to the internal opset, inlines local functions, infers shapes and cleans up what
        exporters leave behind (shapes computed in the graph, Identity, weights in Constants, float16). Weights keep
        their names and shapes. Then it runs both in ONNX Runtime on sample inputs. A file that `save` wrote is only
        read.

        Arguments:
            path: the file; external data lies beside it.
            dynamic_batch: make a first axis of one fixed size that all inputs have the symbolic dimension "batch", if
                batches of another size give the same for each example.

        Returns the model; its `import_report` has the largest deviation, and notes on what was changed or not possible.

        Raises ModelImportError if the file cannot be read, is not valid ONNX, uses what is not standard ONNX, cannot
        be converted, or if the import's results differ.

        Example:
            model = archipel.Model.from_onnx("lenet.onnx")
        """
        return cls(load(path, dynamic_batch))

    @classmethod
    def from_proto(cls, proto: onnx.ModelProto, parameters: Iterable[str] | None = None) -> Model:
        """Bring a model in memory to the internal opset and infer its shapes, without cleaning or comparing.

        Arguments:
            proto: a model of opset 7 or above, without external data.
            parameters: names of the initializers that are weights; by default decided by how they are used.

        Raises ModelImportError.
        """
        return cls(normalize(proto, parameters))

    @classmethod
    def from_torch(
        cls,
        source: torch.nn.Module | torch.export.ExportedProgram | str | os.PathLike[str],
        example: Any = None,
        dynamic_batch: bool = True,
    ) -> Model:
        """Export a PyTorch module, or a program of `torch.export`, and compare the import with it.

        Exported in evaluation mode, with Dropout and BatchNormalization in the graph; parameters keep their names in
        the `state_dict`. Both run on the example and on noise of its shape.

        Arguments:
            source: the module or program, or the path of a .pt2 file; that is a program, so open only what you trust.
            example: a tensor, a NumPy array or a tuple of these that the module takes; programs have their own.
            dynamic_batch: make the first axis of the inputs the symbolic dimension "batch"; a program that does not
                allow it keeps its size, and `import_report` says why.

        Raises ModelImportError if the source cannot be read or exported, or the outputs differ.

        Example:
            model = archipel.Model.from_torch(archipel.models.digits_cnn(seed=0), torch.zeros(2, 1, 28, 28))
        """
        return cls._imported("torch", source, example, dynamic_batch=dynamic_batch)

    @classmethod
    def from_sklearn(cls, estimator: Any, example: Any) -> Model:
        """Convert a fitted scikit-learn estimator or pipeline to standard operators, and compare the two.

        Weights of linear layers become parameters. Both run on the example and on numbers like it.

        Arguments:
            estimator: a fitted estimator, or a pipeline of such.
            example: [examples, features], numbers.

        Returns a model with the input "input", float32 [batch, features]. A classifier has the outputs "logits" and
        "probabilities", [batch, classes] in the order of its `classes_`, or "scores" if it computes no probabilities;
        any other estimator has "output", [batch, targets].

        Raises ModelImportError for an estimator without such a form (trees, kernels), and if the results differ.
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
        """Name, type and shape of each graph input, in order."""
        return tuple(TensorInfo.of(value) for value in self.ir.graph.inputs)

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Name, type and shape of each graph output, in order."""
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
        """The model's source and its deviation from it; None for a model that no importer made."""
        return ImportReport.of(self.ir)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the weights that are initializers of the graph."""
        return parameter_names(self.ir)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The weights that are initializers of the graph, by the names they have in the source.

        Raises GraphError for one without values.
        """
        weights = {}
        for name in self.parameter_names:
            tensor = self.ir.graph.initializers[name].const_value
            if tensor is None:
                raise GraphError(f"parameter {name!r} has no value")
            weights[name] = tensor.numpy()
        return weights

    def copy(self) -> Model:
        """An independent graph; the tensors are shared."""
        return Model(self.ir.clone(), signature=self.signature, initial=self.initial)

    def fix(self, values: Mapping[str, ArrayLike] | None = None, sizes: Mapping[str, int] | None = None) -> Model:
        """A copy in which some inputs have one value for good, and are inputs no longer, and some sizes are numbers.

        What follows from that is computed: a branch (If) whose condition is then known replaces its node, and weights
        that only the other branch reads go.

        Arguments:
            values: the value of an input by its name. It is broadcast to the input's shape; along an axis of symbolic
                size that another input has too, such as the batch, it is repeated at run time as often as that says.
            sizes: a number for a symbolic size of the inputs by its name.

        Raises GraphError for a name that the inputs do not have, a value that does not fit, for a program, and for a
        compressed model that trains another graph.

        Example:
            speech = archipel.Model.from_onnx("speech.onnx").fix({"rate": 16000, "state": 0.0}, sizes={"samples": 512})
        """
        self._refuse_derived("fix")
        model = self.ir.clone()
        inline_functions(model)
        return Model(fix(model, values or {}, sizes or {}), initial=self.initial)

    def limit_loops(self, iterations: int) -> Model:
        """A copy in which no Loop runs longer than `iterations`, unless it has a bound of its own.

        Bounds of its own are constants and what follows from shapes. A loop that only its condition ends (a while of
        PyTorch) has none, and so no limits that a bundle could state: `convert` refuses it.

        Arguments:
            iterations: 1 or more. A loop that would run longer stops there, with the values that it has then.

        Raises GraphError for another number, for a program, and for a compressed model that trains another graph.

        Example:
            model = archipel.Model.from_onnx("beam_search.onnx").limit_loops(64)
        """
        self._refuse_derived("limit_loops")
        copy = self.copy()
        limit_loops(copy.ir, iterations)
        return copy

    def plain_scans(self) -> Model:
        """A copy whose Scans ask the least of an engine, for those that stop at this model's.

        The body of a Scan reads its own inputs alone, without values of the graph around it (OpenVINO knows no others),
        and a Scan reads its sequences from the first item on (so does onnx.reference). ONNX Runtime copies what is
        carried for that once an item. `docs/operators.md` says which engines train what.

        Example:
            step = training.step_graph(model, training.losses.cross_entropy(), training.optimizers.sgd(lr=0.1), steps=4)
            step.plain_scans().save("train.onnx")
        """
        copy = self.copy()
        make_scans_plain(copy.ir)
        return copy

    def _refuse_derived(self, action: str) -> None:
        if self.signature is not None:
            raise GraphError(
                f"{action}: the model is a program, whose inputs have roles; change the model it is made of"
            )
        if getattr(self, "training_form", None) is not None:
            raise GraphError(f"{action}: the model is compressed, and has another graph that trains; do this before")

    def to_bytes(self) -> bytes:
        """The model as one ONNX protobuf; constants that one body of a loop or branch alone reads lie in it."""
        proto = ir.to_proto(self.ir)
        lower_initializers(proto.graph)
        data: bytes = proto.SerializeToString()
        return data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plain ONNX that any runtime opens; weights of about 2 GiB or more go to `<file>.data` beside it.

        A file that is there is replaced by a whole one. Raises OSError.
        """
        path = Path(path)
        size = sum(t.nbytes for v in self.ir.graph.initializers.values() if (t := v.const_value) is not None)
        # One file as long as a protobuf can hold it: external data is easily left behind.
        if size < _EXTERNAL_DATA_FROM:
            write_durably(path, self.to_bytes(), 0o666)
            return
        data = path.with_name(f"{path.name}.data")
        with temporary_folder(path) as folder:
            ir.save(self.ir, folder / path.name, format="protobuf", external_data=data.name)
            sync_tree(folder)
            # First what the other file refers to.
            publish(folder / data.name, data)
            publish(folder / path.name, path)

    def __repr__(self) -> str:
        def show(infos: tuple[TensorInfo, ...]) -> str:
            return ", ".join(f"{i.name}: {i.dtype}[{', '.join(map(str, i.shape))}]" for i in infos)

        kind = f" {self.kind}" if self.kind else ""
        return f"<Model{kind} ({show(self.inputs)}) -> ({show(self.outputs)}), {len(self.ir.graph)} nodes>"
