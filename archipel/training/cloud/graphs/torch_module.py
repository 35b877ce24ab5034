"""`TorchModule`: a graph as a PyTorch module, for training on whatever PyTorch runs on. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from archipel.graph.functions import inline_functions
from archipel.graph.model import Model
from archipel.graph.parameters import Fixed, statistics, trainable_names
from archipel.graph.shapes import dtype_of
from archipel.graph.source_state import further_state
from archipel.training.cloud.graphs.own_rules import OwnRule, has_own_rule
from archipel.training.cloud.graphs.paths import find, has, install, module_paths
from archipel.training.cloud.graphs.stepping import SteppedModule
from archipel.training.cloud.graphs.tracing import CONSTANTS, NODES, Trace, forget_constants
from archipel.training.cloud.ops import LOWERINGS
from archipel.training.cloud.ops.types import to_array, to_torch


class TorchModule(SteppedModule):
    """A graph as a module: its inputs are the graph's, in order or by name, and so are its outputs.

    Parameters and buffers have the names and shapes that they have in the graph; for a model of `Model.from_torch` that
    is the `state_dict` of its source, and `load_state_dict` of either takes the other's. In evaluation mode, in which a
    new one is, it computes what the graph computes. In training mode Dropout drops, and BatchNormalization uses the
    batch's statistics and keeps running ones.

    Attributes:
        source: the model, with the weights that it had.
    """

    source: Model

    def __init__(self, model: Model, trainable: str | Sequence[str] = "*") -> None:
        """Trace the graph.

        Arguments:
            model: any model whose operators have a lowering; a program too, whose inputs and outputs have roles. It is
                not changed.
            trainable: a glob over parameter names, or a list of globs. Others get no gradient; by default neither do
                those that the model's source has frozen.

        Raises TrainingError for a graph that PyTorch cannot run (MissingLoweringError for an operator).

        Example:
            module = training.cloud.TorchModule(archipel.Model.from_onnx("model.onnx"))
            logits = module(torch.zeros(8, 4))
        """
        graph = _without_functions(model)
        paths = module_paths(model.parameter_names, TorchModule, ("source", "_paths", "_written", NODES, CONSTANTS))
        trace = Trace(
            {graph.initializers[name]: path for name, path in paths.items()}, lambda node: OwnRule(model, node)
        )
        trace.run(graph)
        buffers = {*statistics(model.ir), *Fixed.of(model.ir).buffers}
        # A graph whose only parameters are buffers has nothing to train, and runs all the same.
        some = trainable != "*" or set(model.parameter_names) - buffers
        chosen = set(trainable_names(model.ir, trainable)) if some else set()
        contents = dict(trace.contents)
        for name, array in model.parameters.items():
            tensor = to_torch(np.asarray(array))
            is_buffer = name in buffers or not tensor.is_floating_point()
            contents[paths[name]] = tensor if is_buffer else nn.Parameter(tensor, requires_grad=name in chosen)
        root = nn.Module()
        for path, content in contents.items():
            install(root, path, content)
        same, rest = further_state(model)
        super().__init__(root, trace.graph, class_name="TorchModule")
        # GraphModule takes over what its graph reads; the source's state may have more.
        for path, content in contents.items():
            if not has(self, path):
                install(self, path, content)
        for name, twin in same.items():
            install(self, name, find(self, paths[twin]))
        for name, array in rest.items():
            install(self, name, to_torch(array))
        forget_constants(self)
        self.source = model
        self._paths = paths
        self._written = self._floats()
        self.eval()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the graph's inputs, in order."""
        return tuple(info.name for info in self.source.inputs)

    @property
    def convolves(self) -> bool:
        """Whether the graph convolves pictures, for which PyTorch is faster with channels last."""
        nodes = self.source.ir.graph.all_nodes()
        return any(
            node.op_type == "Conv" and node.outputs[0].shape and len(node.outputs[0].shape) == 4 for node in nodes
        )

    def in_order(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """The inputs in the graph's order. Raises TypeError for a name that is missing, unknown or given twice."""
        names = self.input_names
        wrong = [name for name in named if name not in names[len(inputs) :]]
        missing = [name for name in names[len(inputs) :] if name not in named]
        if wrong or missing or len(inputs) > len(names):
            raise TypeError(
                f"the module takes {', '.join(names)}; "
                + (f"{wrong[0]!r} is none of them, or given twice" if wrong else f"{', '.join(missing)} missing")
            )
        return (*inputs, *(named[name] for name in names[len(inputs) :]))

    def to_model(self) -> Model:
        """The model with the module's present weights. The module stays as it is."""
        result = self.source.copy()
        state = self.state_dict()
        for name, path in self._paths.items():
            value = result.ir.graph.initializers[name]
            array = to_array(state[path], dtype_of(value))
            value.const_value = ir.tensor(array, dtype=dtype_of(value), name=name)
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._follow()
        return result

    def _floats(self) -> torch.dtype | None:
        """The one type of all floating-point parameters, if it is float32 or float64."""
        found = {tensor.dtype for path in self._paths.values() if (tensor := find(self, path)).is_floating_point()}
        return found.pop() if len(found) == 1 and found <= {torch.float32, torch.float64} else None

    def _follow(self) -> None:
        """After `double()` or `float()`: what the graph casts to the parameters' former type, cast to their new one."""
        present, written = self._floats(), self._written
        if present is None or written is None or present == written:
            return
        for part in self.modules():
            if isinstance(part, SteppedModule):
                part.change_type(written, present)
        self._written = present

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchModule:
        result = TorchModule(self.source)
        memo[id(self)] = result
        _take_over(result, _content(self))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        source = self.source
        return _restore, (source.to_bytes(), source.signature, source.initial, _content(self))


def _without_functions(model: Model) -> ir.Graph:
    """The graph, with the bodies of functions in their place that have neither a lowering nor a rule of their own."""
    kept = {(domain, name) for domain, name, _ in model.ir.functions if has_own_rule(domain, name)}.union(LOWERINGS)
    if all((domain, name) in kept for domain, name, _ in model.ir.functions):
        return model.ir.graph
    inlined = model.copy().ir
    inline_functions(inlined, keep=kept)
    return inlined.graph


def _content(module: nn.Module) -> dict[str, Any]:
    """What training changes in a module: tensors by path, which of them learn, and which modules are in training."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {path: tensor.detach() for path, tensor in tensors},
        "learning": [path for path, tensor in tensors if tensor.requires_grad],
        "training": [path for path, part in module.named_modules() if part.training],
    }


def _take_over(module: TorchModule, content: Mapping[str, Any]) -> None:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for path, tensor in tensors:
        tensor.data = content["tensors"][path].clone()
        tensor.requires_grad_(path in content["learning"])
    for path, part in module.named_modules():
        part.training = path in content["training"]
    module._follow()


def _restore(data: bytes, signature: Any, initial: Any, content: Mapping[str, Any]) -> TorchModule:
    """A module from its pickle."""
    model = Model.from_proto(onnx.load_from_string(data))
    model.signature, model.initial = signature, dict(initial)
    module = TorchModule(model)
    _take_over(module, content)
    return module
