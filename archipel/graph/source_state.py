"""What a source's state has beside the parameters of its graph, so that the state can be given back whole.

A PyTorch module's `state_dict` may have two names for one tensor (tied weights), tensors that no output depends on, and
integers such as the counters of BatchNorm. The graph has none of them, and `load_state_dict` asks for all.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.model import Model
from archipel.graph.parameters import STATE_KEY, parameter_names

MAX_BYTES = 2**20
"""Of tensors that are kept beside the graph, together; larger ones are left out."""


def record_state(model: ir.Model, state: Mapping[str, np.ndarray], same: Mapping[str, str]) -> list[str]:
    """Write into the metadata what `state` has beside the model's parameters.

    Arguments:
        model: the `onnx_ir.Model` to change; its parameters have the names of `state`.
        state: all tensors of the source by name, in its order.
        same: names that stand for the tensor of another name in `state`.

    Returns the names that are left out: together with those before them they have more than MAX_BYTES.
    """
    known, left, size = set(parameter_names(model)), [], 0
    entries: dict[str, dict[str, object]] = {}
    by_tensor = {same.get(name, name): name for name in known}
    for name, array in state.items():
        twin = by_tensor.get(same.get(name, name))
        if name in known:
            entries[name] = {}
        elif twin is not None:
            entries[name] = {"same": twin}
        elif size + array.nbytes <= MAX_BYTES:
            size += array.nbytes
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            entries[name] = {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}
        else:
            left.append(name)
    if any(entries.values()):
        model.metadata_props[STATE_KEY] = json.dumps(entries)
    return left


def source_state(model: Model, values: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The state of the model's source, by name, with the present parameters.

    Arguments:
        model: a model as an importer made it, trained or compressed since.
        values: replace parameters of these names.

    Returns the parameters, and what the source's state has beside them: further names of a parameter, and tensors that
    the graph does not read, as they were. For a module that `Model.from_torch` imported `load_state_dict` takes it with
    strict=True; parameters that compression has added or removed are so here too.

    Raises GraphError for a value of another name or shape than a parameter, and for a damaged record.

    Example:
        module.load_state_dict({name: torch.tensor(array) for name, array in source_state(model).items()})
    """
    tensors = model.parameters
    for name, array in (values or {}).items():
        if name not in tensors or tensors[name].shape != array.shape:
            expected = f"has shape {list(tensors[name].shape)}" if name in tensors else "is no parameter of the model"
            raise GraphError(f"source_state: {name!r}, of shape {list(array.shape)}, {expected}")
        tensors[name] = array
    entries = {name: tensors.get(entry) if isinstance(entry, str) else entry for name, entry in _entries(model).items()}
    state: dict[str, np.ndarray] = {}
    for name, entry in entries.items():
        # In the source's order. A parameter that compression has replaced is missing, and so are its further names.
        found = tensors.get(name) if entry is None else entry
        if found is not None:
            state[name] = found
    return state | {name: array for name, array in tensors.items() if name not in state}


def further_state(model: Model) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """What the source's state has beside the parameters: further names of a parameter, and tensors that nothing reads.

    Raises GraphError for a damaged record.
    """
    entries, parameters = _entries(model), set(model.parameter_names)
    same = {name: entry for name, entry in entries.items() if isinstance(entry, str) and entry in parameters}
    return same, {name: entry for name, entry in entries.items() if isinstance(entry, np.ndarray)}


def _entries(model: Model) -> dict[str, np.ndarray | str | None]:
    """The record: a tensor, the name of the parameter that is the same, or None for the parameter of that name."""
    recorded = model.ir.metadata_props.get(STATE_KEY)
    if recorded is None:
        return {}
    try:
        return {str(name): _decode(entry) for name, entry in json.loads(recorded).items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, SyntaxError) as error:
        raise GraphError(f"source_state: the record of the source's state is damaged ({error!r})") from None


def _decode(entry: Mapping[str, object]) -> np.ndarray | str | None:
    if "same" in entry:
        return str(entry["same"])
    if "data" not in entry:
        return None
    data = base64.b64decode(str(entry["data"]), validate=True)
    return np.frombuffer(data, np.dtype(str(entry["dtype"]))).reshape(entry["shape"]).copy()  # type: ignore[call-overload,no-any-return]
