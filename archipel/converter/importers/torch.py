"""PyTorch modules and exported programs to Model."""

from __future__ import annotations

import copy
import os
from typing import Any

from archipel.converter.importers import torch_program
from archipel.converter.importers.torch_module import import_module
from archipel.errors import MissingExtraError, ModelImportError
from archipel.graph.model import Model
from archipel.importer_registry import IMPORTERS


@IMPORTERS.register("torch")
def from_torch(source: Any, example: Any = None, *, dynamic_batch: bool = True) -> Model:
    """See `Model.from_torch`.

    Outputs are called "output", or "output_0", "output_1", ... if there are several.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtraError("torch", "cloud") from None
    if isinstance(source, torch.export.ExportedProgram | str | os.PathLike):
        program, name = torch_program.open_program(source)
        module = torch_program.inference_module(program, name)
        if example is None:
            example = torch_program.example_of(program, name)
        return torch_program.import_program(module, example, name, dynamic_batch)
    if example is None:
        raise ModelImportError(f"{type(source).__name__}: a torch module needs example=, a tensor that it takes")
    # A copy, so that the caller's module keeps its mode and its place on the accelerator.
    module = copy.deepcopy(source).cpu().eval()
    return import_module(module, example, type(source).__name__, dynamic_batch)
