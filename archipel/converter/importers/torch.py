"""PyTorch modules and exported programs to Model, through PyTorch's own exporter, compared with them afterwards."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.errors import MissingExtraError, ModelImportError
from archipel.graph.batch import BATCH
from archipel.graph.comparison import TOLERANCE, CannotRunError, Reference, deviation
from archipel.graph.model import Model
from archipel.graph.opset import OPSET
from archipel.graph.passes import simplify
from archipel.graph.report import ImportReport

if TYPE_CHECKING:
    import torch

_NOISE = 2  # inputs beside the example


def from_torch(source: Any, example: Any = None, *, dynamic_batch: bool = True) -> Model:
    """See `Model.from_torch`.

    Outputs are called "output", or "output_0", "output_1", ... if there are several.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtraError("torch", "cloud") from None
    from archipel.converter.importers import torch_program

    if isinstance(source, torch.export.ExportedProgram | str | os.PathLike):
        program, name = torch_program.opened(source)
        module = torch_program.inference_module(program, name)
        if example is None:
            example = torch_program.example_of(program, name)
        return torch_program.imported(module, example, name, dynamic_batch)
    if example is None:
        raise ModelImportError(f"{type(source).__name__}: a torch module needs example=, a tensor that it takes")
    # A copy, so that the caller's module keeps its mode and its place on the accelerator.
    module = copy.deepcopy(source).cpu().eval()
    return import_module(module, example, type(source).__name__, dynamic_batch)


def import_module(module: torch.nn.Module, example: Any, name: str, dynamic_batch: bool) -> Model:
    """Import a module that is on the CPU and in evaluation mode; `name` is for errors. Raises ModelImportError."""
    import torch

    examples = as_tensors(example, dynamic_batch)
    dynamic = None
    if dynamic_batch:
        batch = torch.export.Dim(BATCH)
        dynamic = tuple({0: batch} if tensor.ndim else {} for tensor in examples)
    with quiet(), torch.no_grad():
        feeds = [*([] if _constant(examples) else [examples]), *(noise(examples, seed) for seed in range(_NOISE))]
        try:
            expected = [answers(module, feed) for feed in feeds]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            hint = "; if its batch size is fixed, pass dynamic_batch=False" if dynamic_batch else ""
            raise ModelImportError(f"{name} does not run on the example: {_first_line(error)}{hint}") from error
        with _keeping_dropout(), _translations_read_once():
            model = _export(module, examples, dynamic, name)
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
            f"{name} works for one batch size only: input {fixed[0].name!r} came out as "
            f"{list(fixed[0].shape)}; let its code take the size from the input, or pass dynamic_batch=False"
        )
    found = _compared(imported, feeds, expected)
    if not found <= TOLERANCE:
        raise ModelImportError(
            f"{name}: the import differs from the module by {found:.2g} of its largest output on the example and noise "
            f"like it; {TOLERANCE:g} is allowed"
        )
    ImportReport(f"PyTorch {torch.__version__} ({name})", deviation=found, samples=len(feeds)).record(imported.ir)
    return imported


def answers(module: torch.nn.Module, examples: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    """The module's outputs in order; it gets copies, for it may write into its inputs."""
    return _flat(module(*(tensor.clone() for tensor in examples)))


def noise(examples: tuple[torch.Tensor, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """Inputs of the same shapes: floats with the example's mean and spread, the rest shifted along the first axis."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = []
    for tensor in examples:
        if tensor.is_floating_point() and tensor.numel():
            mean, spread = tensor.double().mean(), tensor.double().std(correction=0)
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            found.append((mean + (spread if spread > 0 else 1.0) * drawn).to(tensor.dtype))
        else:
            found.append(tensor.roll(seed + 1, 0) if tensor.ndim else tensor)
    return tuple(found)


def _compared(model: Model, feeds: Sequence[tuple[torch.Tensor, ...]], expected: Sequence[list[np.ndarray]]) -> float:
    names = [port.name for port in model.inputs]
    try:
        runtime = Reference(model.to_bytes())
        found = [runtime.run({name: tensor.numpy() for name, tensor in zip(names, feed)}) for feed in feeds]
    except CannotRunError as error:
        narrow = all(array.dtype == np.float32 for array in expected[0] if array.dtype.kind == "f")
        hint = "" if narrow else "; float32 runs everywhere: use module.float()"
        raise ModelImportError(f"ONNX Runtime cannot run the import: {error}{hint}") from None
    return max(deviation(ours, theirs) for ours, theirs in zip(found, expected))


def _constant(examples: tuple[torch.Tensor, ...]) -> bool:
    """Whether every tensor of floats is one number all over: a normalization makes rounding errors large of those."""
    floats = [tensor for tensor in examples if tensor.is_floating_point() and tensor.numel()]
    return bool(floats) and all(bool((tensor == tensor.flatten()[0]).all()) for tensor in floats)


def _export(module: torch.nn.Module, examples: tuple[torch.Tensor, ...], dynamic: Any, name: str) -> ir.Model:
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
        raise ModelImportError(_why(name, error, dynamic is not None)) from error
    if exported is None:
        raise ModelImportError(f"{name}: the exporter returned nothing")
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


@functools.cache
def _translations(read: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    return read()


@contextlib.contextmanager
def _translations_read_once() -> Iterator[None]:
    """PyTorch's exporter compiles onnxscript's 500 translations anew with each export; that is half of its time."""
    from torch.onnx._internal.exporter import _registration

    source = getattr(_registration, "onnxscript_apis", None)
    original = getattr(source, "get_torchlib_ops", None)
    if original is None:  # a PyTorch that does it otherwise
        yield
        return
    setattr(source, "get_torchlib_ops", lambda: _translations(original))  # noqa: B010 - it has no such field for mypy
    try:
        yield
    finally:
        setattr(source, "get_torchlib_ops", original)  # noqa: B010


def as_tensors(example: Any, dynamic_batch: bool) -> tuple[torch.Tensor, ...]:
    """The example as tensors on the CPU, at least two in the batch if it is to be dynamic. Raises ModelImportError."""
    import torch

    given = tuple(example) if isinstance(example, tuple | list) else (example,)
    examples = tuple(torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value for value in given)
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


def _flat(outputs: Any) -> list[np.ndarray]:
    if isinstance(outputs, tuple | list):
        return [array for output in outputs for array in _flat(output)]
    if isinstance(outputs, dict):
        return [array for output in outputs.values() for array in _flat(output)]
    if not hasattr(outputs, "detach"):
        raise ModelImportError(f"the module returns {type(outputs).__name__}; only tensors can be exported")
    array: np.ndarray = outputs.detach().numpy()
    return [array]


def _why(name: str, error: BaseException, dynamic_batch: bool) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    first = _first_line(error)
    hint = "; if its batch size is fixed, pass dynamic_batch=False" if dynamic_batch else ""
    return f"{name} cannot be exported: {first}{hint}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
