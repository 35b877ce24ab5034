"""What a lowering sees of its node: inputs as tensors, numbers or sizes, attributes, types and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch

from archipel.errors import TrainingError
from archipel.graph.shapes import Dim, dims, dtype_of
from archipel.training.cloud.ops.bodies import Body, Given
from archipel.training.cloud.ops.sizes import Size, Sizes
from archipel.training.cloud.ops.types import to_torch, torch_dtype

if TYPE_CHECKING:
    from archipel.training.cloud.graphs.tracing import Trace


class NodeContext:
    """One node while it is lowered.

    Attributes:
        node: the node of the ONNX graph.
    """

    def __init__(self, trace: Trace, node: ir.Node, constant: bool = False) -> None:
        self.node = node
        self._trace = trace
        self._constant = constant  # all inputs are constants: the lowering runs on them, and nothing is traced

    # Inputs

    def has(self, index: int) -> bool:
        """Whether the node has this input."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def value(self, index: int) -> ir.Value:
        """The graph's value at an input. Raises TrainingError where there is none."""
        found = self.node.inputs[index] if index < len(self.node.inputs) else None
        if found is None:
            raise TrainingError(f"{self.node.op_type} {self.node.name!r} has no input {index}")
        return found

    def tensor(self, index: int) -> torch.Tensor:
        """The input as a tensor: while a graph is traced a `torch.fx.Proxy`, which lowerings treat as one."""
        found = self._trace.tensor(self.value(index), self._constant)
        return found  # type: ignore[no-any-return]

    def real(self, index: int) -> torch.Tensor:
        """As `tensor`; integers that are held as floating-point numbers are those, with their gradient."""
        found = self._trace.tensor(self.value(index), self._constant, real=True)
        return found  # type: ignore[no-any-return]

    def load(self, value: ir.Value) -> torch.Tensor:
        """A value of the graph that the node reads through others, which are not computed for it."""
        return self._trace.tensor(value)  # type: ignore[no-any-return]

    def tensors(self) -> list[torch.Tensor]:
        """All inputs as tensors."""
        return [self.tensor(index) for index in range(len(self.node.inputs))]

    def operand(self, index: int) -> Any:
        """The input as a tensor, or as a Python number where it is a constant or a size of one element.

        For operators that broadcast: a number costs no memory access. Another operand must be a tensor of the same type
        and of no lower rank.
        """
        constant = self.constant(index)
        if constant is not None and constant.numel() == 1 and not self._constant:
            return constant.item()
        found = self._trace.values.get(self.value(index))
        if isinstance(found, Sizes) and not self._constant and found.rank == 0:
            return found.items[0]
        return self.tensor(index)

    def constant(self, index: int) -> torch.Tensor | None:
        """The content of the input, if the graph fixes it."""
        if not self.has(index):
            return None
        found = self._trace.values.get(self.value(index))
        if isinstance(found, torch.Tensor):
            return found
        if isinstance(found, Sizes) and found.fixed:
            return found.as_constant(self.dtype(index))
        return None

    def sizes(self, index: int) -> list[Size]:
        """The input, of rank 0 or 1, as a list of integers that are known, now or when the module runs.

        Raises TrainingError where not even its length is known.
        """
        return self._trace.sizes(self.value(index), self.node).items

    def is_size(self, index: int) -> bool:
        """Whether the input is a single integer that is known beside the tensors, such as a loop's counter."""
        found = self._trace.values.get(self.value(index))
        return isinstance(found, Sizes) and found.rank == 0

    def fixed(self, index: int) -> list[int]:
        """The input as integers. Raises TrainingError unless the graph fixes them."""
        constant = self.constant(index)
        if constant is None:
            raise TrainingError(
                f"{self.node.op_type} {self.node.name!r}: PyTorch needs {self.value(index).name!r} as a constant; fix "
                "it with Model.fix, or export the model with it fixed"
            )
        return [int(number) for number in constant.reshape(-1).tolist()]

    # Types and shapes

    def rank(self, index: int = 0) -> int:
        """The rank of an input."""
        return len(self.dims(index))

    def dims(self, index: int = 0) -> tuple[Dim, ...]:
        """The dimensions of an input, as far as the graph knows them."""
        return dims(self.value(index))

    def axis(self, name: str, default: int, index: int = 0) -> int:
        """An attribute that is an axis of an input, counted from the front."""
        axis = self.integer(name, default)
        return axis + self.rank(index) if axis < 0 else axis

    def onnx_dtype(self, index: int = 0) -> ir.DataType:
        """The element type of an input in the graph."""
        return dtype_of(self.value(index))

    def dtype(self, index: int = 0) -> torch.dtype:
        """The type of an input's tensor."""
        return torch_dtype(self.onnx_dtype(index))

    def output_type(self, index: int = 0) -> ir.DataType:
        """The element type of an output in the graph."""
        return dtype_of(self.node.outputs[index])

    def output_dims(self, index: int = 0) -> tuple[Dim, ...]:
        """The dimensions of an output, as far as the graph knows them."""
        return dims(self.node.outputs[index])

    def size(self, index: int, axis: int) -> Size:
        """The size of an input's axis: an integer where the graph knows it, else read from the tensor."""
        known = self.dims(index)[axis]
        return known if isinstance(known, int) else self.tensor(index).size(axis)

    @property
    def device(self) -> Any:
        """Where new tensors belong."""
        return torch.device("cpu") if self._constant else self._trace.device()

    # Attributes

    def has_attribute(self, name: str) -> bool:
        return name in self.node.attributes

    def integer(self, name: str, default: int) -> int:
        return int(self.node.attributes.get_int(name, default))

    def number(self, name: str, default: float) -> float:
        return float(self.node.attributes.get_float(name, default))

    def text(self, name: str, default: str) -> str:
        return str(self.node.attributes.get_string(name, default))

    def integers(self, name: str, default: Sequence[int]) -> list[int]:
        return [int(number) for number in self.node.attributes.get_ints(name, tuple(default))]

    def texts(self, name: str, default: Sequence[str]) -> list[str]:
        return [str(text) for text in self.node.attributes.get_strings(name, tuple(default))]

    # What is added to the traced module

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a Python function when the module runs, with tensors in place of the Proxies in `arguments`.

        For functions whose own Python must see real tensors, such as loops.
        """
        return function(*arguments) if self._constant else self._trace.call(function, arguments)

    def module(self, module: torch.nn.Module, *arguments: Any) -> Any:
        """Call a module without parameters, which follows `train()` and `eval()`, when the traced module runs."""
        return module(*arguments) if self._constant else self._trace.call_module(self.node, module, arguments)

    def as_integer(self, real: torch.Tensor, output: int = 0) -> torch.Tensor:
        """An output of an integer type, of whole numbers in a floating-point type that have a gradient.

        Who reads it with `real` gets them so; to others they are integers.
        """
        if self._constant:
            return real.to(torch_dtype(self.output_type(output)))
        self._trace.reals.add(self.node.outputs[output])
        return real

    def new_constant(self, array: np.ndarray) -> torch.Tensor:
        """A constant of the module, which moves with it from device to device."""
        tensor: Any = to_torch(array)
        if not self._constant:
            tensor = self._trace.add_constant(tensor)
        return tensor  # type: ignore[no-any-return]

    def body(self, name: str, given: Mapping[ir.Value, Given] | None = None) -> Body:
        """A body of the node, as a module of its own, with the values that it reads from the graph around it.

        Arguments:
            name: the attribute.
            given: what inputs of the body are, if they are no tensors that the caller hands in: constants, or
                `bodies.NUMBER` for the number of the iteration, which the caller hands in as an integer.
        """
        return self._trace.body(self.node, name, given or {})
