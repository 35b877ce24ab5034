"""PyTorch modules to Model, through PyTorch's own exporter, and compared with the module afterwards."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.converter.importers import torch_bodies, torch_layers
from archipel.converter.importers.answers import compare
from archipel.converter.importers.torch_examples import answers, as_feed, as_tensors, is_constant, noise
from archipel.errors import ModelImportError
from archipel.graph.batch import BATCH
from archipel.graph.importing.comparison import TOLERANCE, CannotRunError
from archipel.graph.model import Model
from archipel.graph.opset import OPSET
from archipel.graph.parameters import Fixed
from archipel.graph.passes import simplify
from archipel.graph.report import ImportReport
from archipel.graph.source_state import record_state

if TYPE_CHECKING:
    import torch

_NOISE = 2  # inputs beside the example


def import_module(module: torch.nn.Module, example: Any, name: str, dynamic_batch: bool) -> Model:
    """Import a module that is on the CPU and in evaluation mode; `name` is for errors. Raises ModelImportError."""
    import torch

    examples = as_tensors(example, dynamic_batch)
    dynamic = None
    if dynamic_batch:
        batch = torch.export.Dim(BATCH)
        dynamic = tuple({0: batch} if tensor.ndim else {} for tensor in examples)
    with quiet(), torch.no_grad():
        feeds = [*([] if is_constant(examples) else [examples]), *(noise(examples, seed) for seed in range(_NOISE))]
        # Before the export, whose errors would not tell that the example does not fit.
        try:
            with torch_layers.noting_packed() as packed:
                expected = [answers(module, feed) for feed in feeds]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in examples)
            hint = ", or pass dynamic_batch=False if its batch size is fixed" if dynamic_batch else ""
            raise ModelImportError(
                f"{name} does not run on the example, {shapes}: {_first_line(error)}; "
                f"give examples as the model takes them{hint}"
            ) from error
        torch_layers.check_layers(module, name, packed)
        with (
            _keeping_dropout(),
            _translations_read_once(),
            torch_layers.taken_apart(),
            torch_bodies.one_version_of_bodies(),
        ):
            model = _export(module, examples, dynamic, name)
        parameters = _parameter_names(module, model)
        simplify(model, keep=parameters)
        _rename_outputs(model)
        # The exporter records stack traces, which contain paths of this machine.
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
    apart = _compared(imported, feeds, expected)
    if not apart <= TOLERANCE:  # also where it is NaN
        raise ModelImportError(
            f"{name}: the import differs from the module by {apart:.2g} of its largest output on the example and noise "
            f"like it; {TOLERANCE:g} is allowed"
        )
    report = ImportReport(f"PyTorch {torch.__version__} ({name})", deviation=apart, samples=len(feeds))
    if left := _record_state(module, imported):
        report = report.with_notes(
            f"the graph does not read {', '.join(left)}, which are too large to be kept beside it"
        )
    report.record(imported.ir)
    _fixed(module, imported.parameter_names).record(imported.ir)
    return imported


def _fixed(module: torch.nn.Module, names: Sequence[str]) -> Fixed:
    """What of the model's parameters PyTorch does not train in the module."""
    tensors = module.named_parameters(remove_duplicate=False)
    held = {name for name, parameter in tensors if not parameter.requires_grad}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return Fixed(frozenset(buffers.intersection(names)), frozenset(held.intersection(names)))


def _record_state(module: torch.nn.Module, model: Model) -> list[str]:
    """Keep what the module's `state_dict` has beside the model's parameters; returns the names of what is not kept."""
    import torch

    state = {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    first: dict[tuple[object, ...], str] = {}
    # Tied parameters are one tensor of one storage.
    same = {
        name: first.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), name)
        for name, value in state.items()
        if value.numel()
    }
    # NumPy has no bfloat16: a tensor of that type that the graph does not read is left out.
    arrays = {name: value.numpy() for name, value in state.items() if value.dtype != torch.bfloat16}
    return record_state(model.ir, arrays, same)


def _compared(model: Model, feeds: Sequence[tuple[torch.Tensor, ...]], expected: Sequence[list[np.ndarray]]) -> float:
    try:
        return compare(model, [as_feed(model, feed) for feed in feeds], expected)
    except CannotRunError as error:
        narrow = all(array.dtype == np.float32 for array in expected[0] if array.dtype.kind == "f")
        hint = (
            ""
            if narrow
            else "; float32 runs everywhere: use module.float(); TorchModule(model).double() computes in float64"
        )
        raise ModelImportError(f"ONNX Runtime cannot run the import: {error}{hint}") from None


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
            custom_translation_table=torch_bodies.translations(),
        )
    except Exception as error:
        raise ModelImportError(_why(name, error, dynamic is not None)) from error
    if exported is None:
        raise ModelImportError(f"{name}: the exporter returned nothing")
    return exported.model


@contextlib.contextmanager
def _keeping_dropout() -> Iterator[None]:
    """Export Dropout that is off as an ONNX Dropout node, the identity in inference, where PyTorch leaves it out.

    `step_graph` turns these nodes on. Covers `nn.Dropout` and `functional.dropout`, and Dropout of whole channels, as
    `nn.Dropout2d` and its like: a product with a Dropout of ones [batch, channels, 1, ...].
    """
    import torch
    from torch.nn import functional

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d")
    originals = {name: getattr(functional, name) for name in names}
    original = functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if training or p == 0.0:
            return original(input, p, training, inplace)
        ratio = torch.tensor(p, dtype=torch.float32)
        return torch.onnx.ops.symbolic("Dropout", (input, ratio), dtype=input.dtype, shape=input.shape, version=OPSET)

    def of_channels(whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def channels(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            if training or p == 0.0 or input.ndim < 3:
                return whole(input, p, training, inplace)
            ones = torch.ones_like(input[(slice(None), slice(None), *[slice(1)] * (input.ndim - 2))])
            return input * dropout(ones, p, training)

        return channels

    functional.dropout = dropout
    for name in names[1:]:
        setattr(functional, name, of_channels(originals[name]))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)


@functools.cache
def _translations(read: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    return read()


@contextlib.contextmanager
def _translations_read_once() -> Iterator[None]:
    """PyTorch's exporter compiles onnxscript's 500 translations anew with each export; that is half of its time."""
    from torch.onnx._internal.exporter import _registration

    source = getattr(_registration, "onnxscript_apis", None)
    original = getattr(source, "get_torchlib_ops", None)
    if original is None:  # another version of PyTorch: exports are slower, and equal
        yield
        return
    setattr(source, "get_torchlib_ops", lambda: _translations(original))  # noqa: B010 - it has no such field for mypy
    try:
        yield
    finally:
        setattr(source, "get_torchlib_ops", original)  # noqa: B010


def _parameter_names(module: torch.nn.Module, model: ir.Model) -> list[str]:
    floating = {name for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    return [name for name in model.graph.initializers if name in floating]


def _rename_outputs(model: ir.Model) -> None:
    outputs = model.graph.outputs
    taken = {value.name for value in model.graph.inputs} | set(model.graph.initializers)
    for i, value in enumerate(outputs):
        name = "output" if len(outputs) == 1 else f"output_{i}"
        # An output that is an input or a weight as it comes has that name.
        if name not in taken and not value.is_graph_input() and value.producer() is not None:
            value.name = name


def _why(name: str, error: BaseException, dynamic_batch: bool) -> str:
    while error.__cause__ is not None:  # the exporter wraps the error that says what is wrong, often more than once
        error = error.__cause__
    first = _first_line(error)
    hint = "; if its batch size is fixed, pass dynamic_batch=False" if dynamic_batch else ""
    if "data-dependent" in first:
        hint = "; forward decides by values in Python, of which a graph knows nothing: use torch.where or torch.cond"
    return f"{name} cannot be exported: {first}{hint}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the exporter's progress, its log of what it did not find, and its warnings about its own calls."""
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
