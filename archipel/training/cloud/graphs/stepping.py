"""A traced graph node by node: each ONNX node's results as they come, and the first NaN by the node's name."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from archipel.errors import NotANumberError
from archipel.mode import get_mode

ONNX_NODE = "archipel.node"
"""Key in the `meta` of a traced node: the ONNX node that it belongs to."""

VALUES = "archipel.values"
"""Key in the `meta` of a traced node: the names of the ONNX values that its result is."""

Watch = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class NodeRun:
    """One node of the graph that has run.

    Attributes:
        name, op_type: the node's.
        values: its results by the names that they have in the graph.
    """

    name: str
    op_type: str
    values: Mapping[str, torch.Tensor]

    def __str__(self) -> str:
        shown = (f"{name} {list(value.shape)}" for name, value in self.values.items())
        return f"{self.op_type} {self.name!r}: {', '.join(shown)}"


class SteppedModule(fx.GraphModule):
    """A traced graph that runs as a whole, or in the mode "eager" node by node."""

    def recompile(self) -> Any:
        code = super().recompile()
        whole = type(self).forward

        def forward(self: SteppedModule, *inputs: Any, **named: Any) -> Any:
            if named:
                inputs = self.in_order(inputs, named)
            if get_mode() == "eager":
                return self._by_node(inputs)
            return whole(self, *inputs)

        type(self).forward = forward
        return code

    def change_type(self, old: torch.dtype, new: torch.dtype) -> None:
        """Make tensors of the type `new` wherever the code makes tensors of `old`."""
        changed = False
        for node in self.graph.nodes:
            given = node.args, node.kwargs
            args, kwargs = fx.node.map_aggregate(given, lambda each: new if each is old else each)
            if (args, kwargs) != given:
                node.args, node.kwargs, changed = args, kwargs, True
        if changed:
            self.recompile()

    def in_order(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """All inputs in the graph's order, from those given in order and by name. Raises TypeError."""
        raise TypeError("a body takes its inputs in order")

    def steps(self, *inputs: Any, **named: Any) -> Generator[NodeRun, None, Any]:
        """Run the graph one node a step.

        Arguments: as the module is called with.

        Yields each ONNX node after it has run; nodes of loops and branches are part of the node that has them. What the
        module returns is the value of the generator's StopIteration.

        Raises NotANumberError behind a node that computes NaN. An error of PyTorch's has a note that names the node.

        Example:
            for run in module.steps(torch.as_tensor(x)):
                print(run)
        """
        interpreter = fx.Interpreter(self, garbage_collect_values=False)
        interpreter.env = {}
        interpreter.args_iter = iter(self.in_order(inputs, named) if named else inputs)
        values: dict[str, torch.Tensor] = {}
        current: ir.Node | None = None
        for node in self.graph.nodes:
            owner = node.meta.get(ONNX_NODE)
            if current is not None and owner is not current:
                yield NodeRun(str(current.name), current.op_type, values)
                values = {}
            current = owner
            try:
                result = interpreter.env[node] = interpreter.run_node(node)
            except NotANumberError:
                raise
            except Exception as error:
                if owner is not None:
                    error.add_note(f"in {owner.op_type} {owner.name!r}, which computes {_names(owner)}")
                raise
            if owner is not None and isinstance(result, torch.Tensor):
                for name in node.meta.get(VALUES, ()):
                    _refuse_nan(result, f"{owner.op_type} {owner.name!r} has computed NaN in {name!r}")
                    _watch_gradient(result, owner, name)
                    values[name] = result
            if node.op == "output":
                return result
        return None

    def watch(self, pattern: str, callback: Watch) -> None:
        """Have a function called with every intermediate value of some name, in the mode "eager".

        Arguments:
            pattern: a glob over the names that values have in the graph.
            callback: takes the name and the tensor.

        Example:
            module.watch("*softmax*", lambda name, value: print(name, value.mean()))
        """
        self.__dict__.setdefault("_watches", []).append((pattern, callback))

    def _by_node(self, inputs: tuple[Any, ...]) -> Any:
        watches = self.__dict__.get("_watches", ())
        running = self.steps(*inputs)
        while True:
            try:
                run = next(running)
            except StopIteration as end:
                return end.value
            for pattern, callback in watches:
                for name, value in run.values.items():
                    if fnmatchcase(name, pattern):
                        callback(name, value)


def _watch_gradient(result: torch.Tensor, owner: ir.Node, name: str) -> None:
    if result.requires_grad:
        text = f"the gradient of {name!r}, which {owner.op_type} {owner.name!r} computes, has become NaN"
        result.register_hook(lambda gradient: _refuse_nan(gradient, text))  # type: ignore[no-untyped-call]


def _refuse_nan(tensor: torch.Tensor, text: str) -> None:
    if tensor.is_floating_point():
        count = int(torch.isnan(tensor).sum())
        if count:
            raise NotANumberError(f"{text}, in {count} of {tensor.numel()} elements")


def _names(node: ir.Node) -> str:
    return ", ".join(repr(value.name) for value in node.outputs)
