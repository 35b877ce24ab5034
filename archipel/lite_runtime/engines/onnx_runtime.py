"""ONNX Runtime: a session of one program, and what the process shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from archipel.errors import RuntimeProgramError
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.delegates import NodePlacement, ProgramPlacement, name_of
from archipel.lite_runtime.engines.program_session import Arrays, ProgramSession
from archipel.lite_runtime.out_of_range import index_error


class Session(ProgramSession):
    """A program in ONNX Runtime."""

    def __init__(
        self,
        name: str,
        native: Any,
        error_types: tuple[type[Exception], ...],
        keep: object = None,
        kernels: str = "",
    ) -> None:
        self.name = name
        self.kernels = kernels
        self.native = native
        self.inputs = frozenset(value.name for value in native.get_inputs())
        self.outputs = frozenset(value.name for value in native.get_outputs())
        self._errors = error_types
        # Replaced initializers stay the caller's memory: ONNX Runtime only points to them.
        self._keep = keep
        self._run = native.run

    def run(self, outputs: Sequence[str], feed: Mapping[str, Any]) -> list[np.ndarray]:
        try:
            return self._run(outputs, feed)  # type: ignore[no-any-return]
        except self._errors as error:
            raise program_error(self.name, "cannot be run", error) from None

    def bind(
        self, inputs: Arrays, outputs: Arrays, bound: dict[int, Any] | None = None, kept: Collection[str] = ()
    ) -> Callable[[], None]:
        binding = self.native.io_binding()
        values = {} if bound is None else bound
        for array in (*inputs.values(), *outputs.values()):
            if id(array) not in values:
                values[id(array)] = bound_value(array)
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, values[id(array)])
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, values[id(array)])
        return partial(self.run_bound, binding)

    def value(self, array: np.ndarray) -> Any:
        return bound_value(array)

    def run_bound(self, binding: Any) -> None:
        """Run with ONNX Runtime's own binding of inputs and outputs. Raises RuntimeProgramError."""
        try:
            self.native.run_with_iobinding(binding)
        except self._errors as error:
            raise program_error(self.name, "cannot be run", error) from None

    def placement(self) -> ProgramPlacement:
        delegates = tuple(map(name_of, self.native.get_providers()))
        # Older versions of ONNX Runtime do not have the method.
        list_parts = getattr(self.native, "get_provider_graph_assignment_info", None)
        if list_parts is None:
            return ProgramPlacement(self.name, delegates, None, self.kernels)
        nodes = [
            NodePlacement(node.name, f"{node.domain}.{node.op_type}" if node.domain else node.op_type, delegate)
            for part in list_parts()
            for delegate in [name_of(part.ep_name)]
            for node in part.get_nodes()
        ]
        return ProgramPlacement(self.name, delegates, tuple(nodes), self.kernels)


def bound_value(array: np.ndarray) -> Any:
    """ONNX Runtime's view of `array`: no copy, and it keeps the array alive. The array must be contiguous."""
    return onnxruntime().OrtValue.ortvalue_from_numpy(array)


def program_error(name: str, what: str, error: Exception) -> RuntimeProgramError:
    text = " ".join(str(error).split())
    return index_error(f"program {name!r}", text) or RuntimeProgramError(
        f"program {name!r} {what}: ONNX Runtime says: {one_line(error)}"
    )


@cache
def onnxruntime() -> Any:
    """The package, imported when it is first asked for: a device that waits for work does not spend memory on it."""
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


_PRODUCT = (
    b'\x08\x08:=\n\x18\n\x01a\n\x01b\x12\x01y"\rMatMulInteger\x12\x00Z\t\n\x01a\x12\x04\n\x02\x08\x02'
    b"Z\t\n\x01b\x12\x04\n\x02\x08\x03b\t\n\x01y\x12\x04\n\x02\x08\x06B\x04\n\x00\x10\r"
)
"""An ONNX file: y = MatMulInteger(a, b), of uint8 and int8."""


_TO_UINT8 = "session.x64quantprecision"


@cache
def products_overflow() -> bool:
    """Whether integer kernels are wrong here: those of x86-64 without VNNI add two products in 16 bits.

    Found by a product, in some 5 ms, once in a process.
    """
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(_PRODUCT, options, providers=["CPUExecutionProvider"])
    largest = {"a": np.full((4, 64), 255, np.uint8), "b": np.full((64, 16), 127, np.int8)}
    return bool((session.run(None, largest)[0] != 64 * 255 * 127).any())


def open_exact(source: str | bytes, options: Any, **more: Any) -> Any:
    """A session of ONNX Runtime on the CPU that computes quantized layers as the graph says, also where the processor's
    integer kernels would not.

    There, layers between QuantizeLinear and DequantizeLinear are computed in float, and the weights of integer products
    are moved to uint8, whose kernels are exact.

    Args:
        source: a file's path, or the graph in bytes.
        options: of the session; changed where that is needed.
        more: further arguments of ONNX Runtime's InferenceSession.
    """
    ort = onnxruntime()
    more = {"providers": ["CPUExecutionProvider"], **more}
    if not products_overflow():
        return ort.InferenceSession(source, options, **more)
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry(_TO_UINT8, "1")
    try:
        return ort.InferenceSession(source, options, **more)
    except error_types():
        # ONNX Runtime forgets the zero points of some operators, such as its own QGemm, of which archipel makes none.
        options.add_session_config_entry(_TO_UINT8, "0")
        return ort.InferenceSession(source, options, **more)


@cache
def share_arena() -> None:
    ort = onnxruntime()
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    # Doubling, as ONNX Runtime's own arenas do, so that a block often holds the next larger batch, too.
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": 0}))


@cache
def error_types() -> tuple[type[Exception], ...]:
    """The exceptions that ONNX Runtime raises; its own ones share no base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    types = [value for value in vars(native).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*types, RuntimeError, ValueError)
