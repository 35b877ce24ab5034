"""Writes a small ONNX graph together with the roles of its ports, such as those of `begin` and `finish`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Input, ProgramKind, Result, State
from archipel.errors import ConversionError, MissingExtraError
from archipel.strategies.device import CHOICE

if TYPE_CHECKING:
    import onnx

_OPSET, _IR_VERSION = 21, 10


def round_state(tensor: str, shape: tuple[int, ...]) -> State:
    """The port of a float32 tensor that is kept for the round, under the tensor's own name."""
    return State(name=tensor, tensor=tensor, dtype="float32", shape=shape, lifetime="round")


def device_state(port: str, tensor: str, shape: tuple[int, ...], init: float | str = 0.0) -> State:
    """A port of a float32 tensor that the device keeps from round to round."""
    return State(name=port, tensor=tensor, dtype="float32", shape=shape, lifetime="device", init=init)


def choice_state() -> State:
    """The port of the state CHOICE."""
    return State(name=CHOICE, tensor=CHOICE, dtype="int64", shape=(), lifetime="device", init=CHOICE)


class ProgramGraph:
    """Collects nodes, constants and ports, in the order in which they are added.

    `name` is the strategy's, the prefix of its own tensors. Raises MissingExtraError where onnx is not installed.
    """

    def __init__(self, kind: ProgramKind, name: str) -> None:
        try:
            import onnx
        except ModuleNotFoundError:
            raise MissingExtraError("onnx", "convert") from None
        self._onnx = onnx
        self._kind = kind
        self.name = name
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs: dict[str, Input] = {}
        self._outputs: list[Result] = []

    def own(self, name: str) -> str:
        """`name` with the strategy's prefix: the slash keeps it apart from the model's names, such as "weight"."""
        return f"{self.name}/{name}"

    def node(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a standard operator with the one output `output`, whose name is returned."""
        self._nodes.append(self._onnx.helper.make_node(op_type, inputs, [output], output, **attributes))
        return output

    def largest(self, values: str, count: int, output: str) -> str:
        """Add the places of the `count` largest of `values`, which has one axis, the largest first (int64)."""
        size = self.array(f"{output}.count", np.array([count]))
        names = [f"{output}.values", output]
        self._nodes.append(self._onnx.helper.make_node("TopK", [values, size], names, largest=1, sorted=1))
        return output

    def constant(self, name: str, value: float) -> str:
        """Add a float32 scalar; return its full name."""
        full = self.own(name)
        self._constants[full] = self._onnx.numpy_helper.from_array(np.array(value, np.float32), full)
        return full

    def array(self, name: str, value: np.ndarray | np.generic) -> str:
        """Add a constant of any shape and type under its full name, which is returned."""
        self._constants[name] = self._onnx.numpy_helper.from_array(np.asarray(value), name)
        return name

    def input(self, port: Input) -> str:
        """Add a graph input and return its name. Adding the same port again changes nothing.

        Raises ConversionError where another port has this name.
        """
        if self._inputs.setdefault(port.name, port) != port:
            raise ConversionError(
                f"strategy {self.name!r}: two tensors of {self._kind} are called {port.name!r}; rename the model's"
            )
        return port.name

    def output(self, port: Result) -> None:
        """Make the value with the port's name an output."""
        self._outputs.append(port)

    def build(self) -> tuple[onnx.ModelProto, Program]:
        """The checked model and its signature."""
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes,
            self._kind,
            [self._info(port) for port in self._inputs.values()],
            [self._info(port) for port in self._outputs],
            list(self._constants.values()),
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
        self._onnx.checker.check_model(model, full_check=True)
        return model, Program(kind=self._kind, inputs=tuple(self._inputs.values()), outputs=tuple(self._outputs))

    def _info(self, port: Input | Result) -> onnx.ValueInfoProto:
        helper = self._onnx.helper
        dtype = helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype))
        info: onnx.ValueInfoProto = helper.make_tensor_value_info(port.name, dtype, port.shape)
        return info
