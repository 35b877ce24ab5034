"""Programs of `torch.export`: read, put into evaluation mode, and imported like a module."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archipel.converter.importers.answers import compare
from archipel.converter.importers.torch_examples import answers, as_feed, as_tensors, noise
from archipel.converter.importers.torch_module import import_module, quiet
from archipel.errors import ModelImportError
from archipel.graph.batch import STAYS, FixedBatchError, fixed_batch, free_batch
from archipel.graph.importing.comparison import TOLERANCE, CannotRunError
from archipel.graph.model import Model
from archipel.graph.report import ImportReport
from archipel.zips import ZIP_ERRORS

if TYPE_CHECKING:
    import torch

_MAX_BYTES = 2**32
_EXAMPLES = 3

# The argument that says whether an operator trains: (position, name, its value for inference).
_MODES: dict[str, tuple[int, str, object]] = {
    "aten.batch_norm.default": (5, "training", False),
    "aten.dropout.default": (2, "train", False),
    "aten.feature_dropout.default": (2, "train", False),
    "aten.alpha_dropout.default": (2, "train", False),
    "aten.feature_alpha_dropout.default": (2, "train", False),
    "aten.rrelu.default": (3, "training", False),
    "aten.scaled_dot_product_attention.default": (4, "dropout_p", 0.0),
}

# What `run_decompositions` makes of layers in training mode. From these nobody can tell which layer it was.
_DECOMPOSED = (
    "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit_functional.default",
    "aten._batch_norm_with_update_functional.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten.native_batch_norm.default",
    "aten.native_dropout.default",
)


def open_program(
    source: torch.export.ExportedProgram | str | os.PathLike[str],
) -> tuple[torch.export.ExportedProgram, str]:
    """The program, and its name for errors. Raises ModelImportError for a file that is no program."""
    import torch

    if isinstance(source, torch.export.ExportedProgram):
        return source, "ExportedProgram"
    path = os.fspath(source)
    # Before PyTorch reads it: a small archive may unpack to more than the memory.
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except FileNotFoundError:
        raise ModelImportError(f"{path} does not exist") from None
    except ZIP_ERRORS as error:
        raise ModelImportError(
            f"{path}: not a program of torch.export.save, or a damaged one ({error}); a state_dict or a pickled module "
            "is not one: export with torch.export.export(module, example)"
        ) from error
    if size > _MAX_BYTES:
        raise ModelImportError(f"{path}: unpacks to {size} bytes; at most {_MAX_BYTES} are supported")
    try:
        with quiet(), _tensors_only():
            return torch.export.load(path), os.path.basename(path)
    except Exception as error:
        # So does PyTorch, from a missing member to a field that the schema does not have.
        raise ModelImportError(f"{path}: not a program of torch.export.save, or a damaged one ({error})") from error


def inference_module(program: torch.export.ExportedProgram, name: str) -> torch.nn.Module:
    """The program as a module in evaluation mode, for any batch size that its code takes. `program` is not changed."""
    module: torch.fx.GraphModule = program.module()
    for node in list(module.graph.nodes):
        kind = str(node.target)
        if kind in _DECOMPOSED:
            raise ModelImportError(
                f"{name}: {kind.split('.')[1]} ({node.name}) is a layer decomposed in training mode; export the "
                "module again, with torch.export.export(module.eval(), example), and save it before run_decompositions"
            )
        if kind == "_guards_fn":
            module.graph.erase_node(node)  # checks sizes against the example's
        elif kind.startswith("aten.add_.") and _counts_batches(node.args[0]):
            # BatchNorm's count of batches changes in training only, and ONNX has no operator that changes its input.
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif kind in _MODES:
            position, argument, value = _MODES[kind]
            _check_mode(node, name)
            if len(node.args) > position:
                node.args = (*node.args[:position], value, *node.args[position + 1 :])
            elif argument in node.kwargs:
                node.kwargs = {**node.kwargs, argument: value}
            if kind == "aten.dropout.default":
                # As the function that the importer replaces, so that the node survives the export.
                node.target, node.args = _dropout, tuple(node.args[:2])
    module.graph.lint()
    module.recompile()
    return module


def example_of(program: torch.export.ExportedProgram, name: str) -> tuple[Any, ...]:
    """The inputs that the program was exported with. Raises ModelImportError if the program does not have them."""
    if program.example_inputs is None:
        raise ModelImportError(f"{name}: the program has no example inputs; pass example=, a tensor that it takes")
    given, named = program.example_inputs
    return (*given, *named.values())


def import_program(module: torch.nn.Module, example: Any, name: str, dynamic_batch: bool) -> Model:
    """Import with a symbolic batch size if possible, else with the program's own size and a note."""
    if not dynamic_batch:
        return _at_own_size(module, example, name)
    try:
        return import_module(module, example, name, dynamic_batch=True)
    except ModelImportError as error:
        # The example's sizes may be written into the program: import it with them, then free the graph's batch.
        model, why = _at_own_size(module, example, name), str(error)
    report = model.import_report or ImportReport(name)
    try:
        free, apart = _freed(model, module, as_tensors(example, dynamic_batch=False))
        note = f"the batch, {fixed_batch(model.ir)} in the program, is symbolic; checked with {_EXAMPLES} times as many"
        model, report = free, replace(report, deviation=max(apart, report.deviation or 0.0)).with_notes(note)
    except FixedBatchError as error:
        report = report.with_notes(f"{STAYS}as in the program: {error}; PyTorch: {why}")
    report.record(model.ir)
    return model


def _at_own_size(module: torch.nn.Module, example: Any, name: str) -> Model:
    return import_module(module, example, name, dynamic_batch=False)


def _freed(model: Model, module: torch.nn.Module, examples: tuple[torch.Tensor, ...]) -> tuple[Model, float]:
    """The model with a symbolic batch size, and how far it is from `module`. Raises FixedBatchError."""
    import torch

    free = Model(free_batch(model.ir))
    # The module takes its own batch size only. Its answers to several batches are joined and compared with the import's
    # answer to the joined batch: they agree only if examples do not influence each other.
    with quiet(), torch.no_grad():
        feeds = [examples, *(noise(examples, seed) for seed in range(_EXAMPLES - 1))]
        expected = [np.concatenate(parts) for parts in zip(*(answers(module, feed) for feed in feeds))]
    joined = [torch.cat(parts) if parts[0].ndim else parts[0] for parts in zip(*feeds)]
    try:
        apart = compare(free, [as_feed(free, joined)], [expected])
    except (CannotRunError, ModelImportError) as error:
        raise FixedBatchError(str(error)) from None
    if not apart <= TOLERANCE:
        raise FixedBatchError(f"examples of a batch influence each other ({apart:.2g} of the largest output)")
    return free, apart


def _dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    from torch.nn import functional

    return functional.dropout(x, p, training=False)  # looked up when called, and by then the importer's own


def _counts_batches(node: Any) -> bool:
    return getattr(node, "op", None) == "get_attr" and str(node.target).endswith("num_batches_tracked")


def _check_mode(node: Any, name: str) -> None:
    if str(node.target) == "aten.batch_norm.default" and len(node.args) > 4 and node.args[3] is None:
        raise ModelImportError(
            f"{name}: batch_norm ({node.name}) keeps no running statistics (track_running_stats=False), so each "
            "example's answer depends on the batch; keep statistics, or use GroupNorm"
        )


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """Let torch.export.load unpickle tensors only: a file must not bring classes that run code."""
    import torch

    original = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "weights_only": True})

    torch.load = load
    try:
        yield
    finally:
        torch.load = original
