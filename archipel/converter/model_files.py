"""`export`: what was learned becomes a model file again, for ONNX Runtime or for the module that it came from."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from archipel.bundle import write_weights
from archipel.converter.opened import open_model
from archipel.durable import write_durably
from archipel.errors import ConversionError, MissingExtraError
from archipel.graph import Model
from archipel.graph.model_card import CARD_KEY, card_of
from archipel.graph.parameters import NAMES_KEY
from archipel.graph.source_state import source_state


def export(
    source: Model | str | os.PathLike[str],
    path: str | os.PathLike[str],
    trusted_keys: Sequence[bytes] = (),
    *,
    weights: str | os.PathLike[str] | Mapping[str, np.ndarray] | None = None,
    force: bool = False,
    allow_development: bool = False,
) -> Model:
    """Write a model, with what it has learned, as a file that other tools read.

    Arguments:
        source: a bundle, a slot folder, what `archipel fit --save` or `Runtime.save` wrote, an ONNX file, or a Model.
        path: the new file. `.onnx`: an inference model in float, with the inputs and outputs of the model that was
            converted. `.safetensors` and `.pt`: the `state_dict` of its PyTorch module. The model card goes along, as
            metadata "archipel.card" (of `.pt`: in `state_dict._metadata`).
        trusted_keys: publishers' public keys, 32 bytes each; needed for a bundle.
        weights: all parameters of the bundle, which replace its own: by name, as `OperatorClient.weights.read` returns
            them, or a safetensors file of them, as `archipel task download` writes it.
        force: replace a file at `path`. It is the old file or the whole new one, also after a kill.
        allow_development: also open a bundle that a development key signed.

    Returns the model that was written.

    Raises ConversionError for a path with another ending or that exists, for weights that do not fit, and for a bundle
    that has no float parameters; MissingExtraError where `.pt` is asked for without PyTorch; OSError; and what
    `open_model` raises.

    Example:
        archipel.export("digits.bundle", "digits.safetensors", [load_public_key("publisher.pub")], weights="task.st")
        module.load_state_dict(safetensors.torch.load_file("digits.safetensors"), strict=True)
    """
    path = Path(path)
    encode = _ENCODERS.get(path.suffix)
    if encode is None:
        raise ConversionError(f"{path}: expected a name that ends in {', '.join(_ENCODERS)}")
    if path.is_dir():
        raise ConversionError(f"{path}: is a folder; name a file")
    if path.exists() and not force:
        raise ConversionError(f"{path}: exists already; choose another name, or replace it with force=True")
    if path.suffix == ".pt":
        _torch()  # before anything is read
    if isinstance(source, Model) and weights is not None:
        raise ConversionError("weights: are for a bundle; set those of a Model in the model")
    if isinstance(source, Model):
        model = source
    else:
        model = open_model(source, trusted_keys, weights, allow_development=allow_development)
    write_durably(path, encode(model), 0o666)
    return model


def _onnx(model: Model) -> bytes:
    try:
        return model.to_bytes()
    except (EncodeError, ValueError):
        raise ConversionError(
            "the model is larger than 2 GiB, which one ONNX file cannot hold; export .safetensors"
        ) from None


def _safetensors(model: Model) -> bytes:
    return write_weights(_state(model), _card_text(model))


def _pt(model: Model) -> bytes:
    torch = _torch()
    buffer = io.BytesIO()
    # Tensors alone, which `torch.load(weights_only=True)` takes. Modules read in `_metadata` what has their own names.
    state = OrderedDict((name, torch.from_numpy(array.copy())) for name, array in _state(model).items())
    state._metadata = OrderedDict(_card_text(model))  # type: ignore[attr-defined]
    torch.save(state, buffer)
    return buffer.getvalue()


def _card_text(model: Model) -> dict[str, str]:
    """The model's card as metadata of a file; {} without one."""
    return {} if card_of(model.ir) is None else {CARD_KEY: model.ir.metadata_props[CARD_KEY]}


def _state(model: Model) -> dict[str, np.ndarray]:
    if NAMES_KEY not in model.ir.metadata_props:
        raise ConversionError(
            "the bundle only predicts: its weights are in the form in which devices run them, without their source's "
            "names; export .onnx, or convert with a loss"
        )
    return source_state(model)


_ENCODERS: dict[str, Callable[[Model], bytes]] = {".onnx": _onnx, ".safetensors": _safetensors, ".pt": _pt}


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtraError("torch", "cloud") from None
    return torch
