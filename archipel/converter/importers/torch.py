"""PyTorch modules to Model, through PyTorch's own exporter, compared with the module afterwards."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime

from archipel.errors import MissingExtraError, ModelImportError
from archipel.graph.model import Model
from archipel.graph.opset import OPSET
from archipel.graph.passes import simplify
from archipel.lite_runtime.sessions import error_types

if TYPE_CHECKING:
    import torch

BATCH = "batch"
TOLERANCE = 1e-4
DEVIATION_KEY = "archipel.import_deviation"


def from_torch(module: torch.nn.Module, example: Any, *, dynamic_batch: bool = True) -> Model:
    """See `Model.from_torch`. The largest deviation found is kept in the model's metadata.

    Deviation: largest absolute difference over the largest absolute output, float32, on the example.
    Outputs are called "output", or "output_0", "output_1", ... if there are several.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtraError("torch", "cloud") from None

    # A copy, so that the caller's module keeps its mode and its place on the accelerator.
    module = copy.deepcopy(module).cpu().eval()
    examples = _examples(example, dynamic_batch)
    dynamic = None
    if dynamic_batch:
        batch = torch.export.Dim(BATCH)
        dynamic = tuple({0: batch} if tensor.ndim else {} for tensor in examples)
    with _quiet(), torch.no_grad():
        expected = _flat(module(*examples))
        with _keeping_dropout():
            model = _export(module, examples, dynamic)
        parameters = _parameter_names(module, model)
        simplify(model, keep=parameters)
        _rename_outputs(model)
        # The exporter records stack traces, and with them paths of this machine.
        common.ClearMetadataAndDocStringPass()(model)
        model.metadata_props.clear()
        proto = ir.to_proto(model)
    imported = Model.from_proto(proto, parameters)
    fixed = [port for port in imported.inputs if dynamic_batch and port.shape and port.shape[0] != BATCH]
    if fixed:
        raise ModelImportError(
            f"{type(module).__name__} works for one batch size only: input {fixed[0].name!r} came out as "
            f"{list(fixed[0].shape)}; let its code take the size from the input, or pass dynamic_batch=False"
        )
    deviation = _deviation(imported, examples, expected)
    if not deviation <= TOLERANCE:
        raise ModelImportError(
            f"{type(module).__name__}: the import differs from the module by {deviation:.2g} of its largest output on "
            f"the example; {TOLERANCE:g} is allowed"
        )
    imported.ir.metadata_props[DEVIATION_KEY] = f"{deviation:.3g}"
    return imported


def _export(module: torch.nn.Module, examples: tuple[torch.Tensor, ...], dynamic: Any) -> ir.Model:
    import torch

    try:
        exported = torch.onnx.export(
            module,
            examples,
            dynamo=True,
            optimize=False,
            opset_version=OPSET,
            dynamic_shapes=dynamic,
            verbose=False,
        )
    except Exception as error:
        raise ModelImportError(_why(module, error, dynamic is not None)) from error
    if exported is None:
        raise ModelImportError(f"{type(module).__name__}: the exporter returned nothing")
    return exported.model


@contextlib.contextmanager
def _keeping_dropout() -> Iterator[None]:
    """Dropout that is off comes out as an ONNX Dropout node (the identity, for inference) and not as nothing.

    A training graph made of the model turns it on. Covers `nn.Dropout` and `functional.dropout`.
    """
    import torch
    from torch.nn import functional

    original = functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if training or p == 0.0:
            return original(input, p, training, inplace)
        ratio = torch.tensor(p, dtype=torch.float32)
        return torch.onnx.ops.symbolic("Dropout", (input, ratio), dtype=input.dtype, shape=input.shape, version=OPSET)

    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = original


def _examples(example: Any, dynamic_batch: bool) -> tuple[torch.Tensor, ...]:
    import torch

    given = tuple(example) if isinstance(example, tuple | list) else (example,)
    examples = tuple(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in given)
    for tensor in examples:
        if not isinstance(tensor, torch.Tensor):
            raise ModelImportError(f"example: expected tensors or NumPy arrays, got {type(tensor).__name__}")
    examples = tuple(tensor.detach().cpu() for tensor in examples)
    if not dynamic_batch:
        return examples
    sizes = {tensor.shape[0] for tensor in examples if tensor.ndim}
    if len(sizes) != 1 or 0 in sizes:
        raise ModelImportError(
            f"example: the first axis of every tensor is the batch, but the sizes are {sorted(sizes)}; "
            "make them equal, or pass dynamic_batch=False"
        )
    if sizes == {1}:
        # The exporter takes a size of 1 for a fixed one.
        examples = tuple(torch.cat([tensor, tensor]) if tensor.ndim else tensor for tensor in examples)
    return examples


def _parameter_names(module: torch.nn.Module, model: ir.Model) -> list[str]:
    floating = {name for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    return [name for name in model.graph.initializers if name in floating]


def _rename_outputs(model: ir.Model) -> None:
    outputs = model.graph.outputs
    taken = {value.name for value in model.graph.inputs} | set(model.graph.initializers)
    for i, value in enumerate(outputs):
        name = "output" if len(outputs) == 1 else f"output_{i}"
        if name not in taken and not value.is_graph_input() and value.producer() is not None:
            value.name = name


def _deviation(model: Model, examples: tuple[torch.Tensor, ...], expected: list[np.ndarray]) -> float:
    try:
        session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
        names = [port.name for port in session.get_inputs()]
        found = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, examples)})
    except error_types() as error:
        narrow = all(array.dtype == np.float32 for array in expected if array.dtype.kind == "f")
        hint = "" if narrow else "; float32 runs everywhere: use module.float()"
        raise ModelImportError(f"ONNX Runtime cannot run the import: {error}{hint}") from None
    if len(found) != len(expected):
        raise ModelImportError(f"the import has {len(found)} outputs, the module {len(expected)}")
    worst = 0.0
    for ours, theirs in zip(found, expected):
        if ours.shape != theirs.shape:
            raise ModelImportError(f"the import gives shape {list(ours.shape)}, the module {list(theirs.shape)}")
        scale = max(float(np.max(np.abs(theirs), initial=0.0)), 1e-30)
        worst = max(worst, float(np.max(np.abs(ours.astype(np.float64) - theirs), initial=0.0)) / scale)
    return worst


def _flat(outputs: Any) -> list[np.ndarray]:
    if isinstance(outputs, tuple | list):
        return [array for output in outputs for array in _flat(output)]
    if isinstance(outputs, dict):
        return [array for output in outputs.values() for array in _flat(output)]
    if not hasattr(outputs, "detach"):
        raise ModelImportError(f"the module returns {type(outputs).__name__}; only tensors can be exported")
    array: np.ndarray = outputs.detach().numpy()
    return [array]


def _why(module: torch.nn.Module, error: BaseException, dynamic_batch: bool) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    hint = "; if its batch size is fixed, pass dynamic_batch=False" if dynamic_batch else ""
    return f"{type(module).__name__} cannot be exported: {first}{hint}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints progress, logs what it did not find and warns about its own calls."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
