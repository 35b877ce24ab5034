"""Model files, bundles and what was learned on top of them as one `Model` in float, with the source's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import Example, Parameter, Personal, State
from archipel.compression.stored import fix_inputs, read_program
from archipel.converter.device_half.replaced import merge_back
from archipel.converter.sources import read_model
from archipel.errors import ConversionError, RuntimeProgramError
from archipel.graph import Model
from archipel.graph.importing.bundled import read_bundled
from archipel.graph.importing.onnx_import import import_onnx
from archipel.graph.model_card import set_card
from archipel.graph.passes.constants import UNPACK
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.learned import is_model_file, join_names
from archipel.lite_runtime.runtime import open_runtime
from archipel.lite_runtime.training.driver import find_program, need_program
from archipel.lite_runtime.values import Values
from archipel.strategies.device import CHOICE, STACK

_INTEGER_NODES = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearConv",
     "QLinearMatMul"}
)  # fmt: skip


def open_model(
    path: str | os.PathLike[str],
    trusted_keys: Sequence[bytes] = (),
    weights: str | os.PathLike[str] | Mapping[str, np.ndarray] | None = None,
    cache: str | os.PathLike[str] | None = None,
    allow_development: bool = False,
    number: int = 0,
) -> Model:
    """The model that a file or folder holds, in float and with its present parameters.

    Arguments:
        path: an ONNX or .pt2 file, a bundle, a slot folder, or what `Runtime.save` or `archipel fit --save` wrote.
        trusted_keys: publishers' public keys, 32 bytes each; needed for all but model files, which nobody signs.
        weights: all parameters of a bundle, which replace its own: by name, as `OperatorClient.weights.read` returns
            them, or a safetensors file of them, as `archipel task download` writes it.
        cache: the folder below which a `.bundle` file is unpacked; None: the user's cache folder.
        allow_development: also open a bundle that a development key signed.
        number: which of the models of a bundle that has several (strategy "ifca"), from 0.

    Returns a model that converts, compresses and exports. A bundle that trains gives back the graph that it was
    converted from, a bundle that only predicts the graph of `predict`, if that is in float.

    Raises ModelImportError, the BundleError that says what is wrong, RuntimeInputError for weights that do not fit,
    ConversionError.

    Example:
        model = open_model("digits.bundle", [load_public_key("publisher.pub")], "task.safetensors")
    """
    if is_model_file(Path(path)):
        if weights is not None:
            raise ConversionError(f"{os.fspath(path)}: weights are for a bundle; a model file has its own")
        return read_model(path, None)
    runtime = open_runtime(
        Path(path),
        trusted_keys,
        cache=None if cache is None else Path(cache),
        weights=os.fspath(weights) if isinstance(weights, os.PathLike) else weights,
        allow_development=allow_development,
    )
    if number:
        _choose(runtime, number)
    return source_model(runtime)


def _choose(runtime: Runtime, number: int) -> None:
    stacks = [spec.shape[0] for spec in runtime.bundle.manifest.parameters if spec.name.endswith(STACK)]
    if not stacks or not 0 <= number < int(stacks[0]):
        there = f"models 0 to {int(stacks[0]) - 1}" if stacks else "one model"
        raise ConversionError(f"number: {number}, but bundle {runtime.bundle.manifest.name!r} has {there}")
    runtime.restore(join_names({"state": {CHOICE: np.array(number, np.int64)}}))


def source_model(runtime: Runtime) -> Model:
    """The float model of a runtime's bundle, with the runtime's present parameters, personal tensors and statistics.

    Its parameters have the names and shapes of the model that was converted; adapters are merged into their weights.
    Its card goes along in the metadata. Raises ConversionError for a bundle without float parameters, CardError.
    """
    bundle = runtime.bundle
    model = _trained(runtime) if bundle.manifest.source else _predicting(runtime)
    if bundle.card is not None:
        set_card(model.ir, bundle.card)
    return model


def _trained(runtime: Runtime) -> Model:
    bundle = runtime.bundle
    model = Model(import_onnx(read_bundled(bundle.folder, bundle.manifest.source)))
    # `refresh` reads everything that training moves, each under the name that it has in the source.
    refresh = bundle.program(need_program(bundle, "refresh", "be exported"))
    values = Values(bundle, runtime.parameters(), runtime.state)
    for port in refresh.inputs:
        if isinstance(port, Parameter | Personal | State):
            name = port.init if isinstance(port, State) and isinstance(port.init, str) else port.name
            _set(model, name, values.read(port))
    merge_back(model)
    return model


def predict_model(runtime: Runtime) -> Model:
    """The graph that predicts, as it runs on the runtime's device now, with only the examples as inputs.

    Raises RuntimeProgramError for a bundle that does not predict, ModelImportError.
    """
    bundle = runtime.bundle
    name = need_program(bundle, "predict", "be read as a model")
    model = read_program(bundle, name)
    for tensor, content in runtime.derived().items():
        _set(model, tensor, content)
    values = Values(bundle, runtime.parameters(), runtime.state)
    ports = [port for port in bundle.program(name).inputs if not isinstance(port, Example)]
    return fix_inputs(model, {port.name: values.read(port) for port in ports})


def _predicting(runtime: Runtime) -> Model:
    bundle = runtime.bundle
    if find_program(bundle, "train") is not None:
        raise ConversionError(
            f"bundle {bundle.manifest.name!r} has no graph of its source: an earlier version made it; convert it again"
        )
    try:
        model = predict_model(runtime)
    except RuntimeProgramError as error:
        raise ConversionError(str(error)) from None
    integers = [node for node in model.ir.graph.all_nodes() if node.op_type in _INTEGER_NODES or _is_packed(node)]
    if integers:
        node = integers[0]
        raise ConversionError(
            f"bundle {bundle.manifest.name!r} only predicts, and has no float parameters: {node.op_type} {node.name!r} "
            f"reads integers; export a bundle that trains, or use the file that it was converted from"
        )
    return model


def _is_packed(node: ir.Node) -> bool:
    kinds = [value.dtype for value in node.inputs if value is not None]
    return UNPACK in node.metadata_props and any(kind is not None and kind.is_integer() for kind in kinds)


def _set(model: Model, name: str, content: np.ndarray) -> None:
    model.ir.graph.initializers[name].const_value = ir.tensor(content, name=name)
