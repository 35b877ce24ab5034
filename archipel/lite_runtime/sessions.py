"""ONNX Runtime sessions of a bundle's programs, made when first needed and kept.

Graphs are opened by path, so that their external data (weights.safetensors beside them) is mapped, not read.
ONNX Runtime itself is imported here, with the first session: a device that waits for work does not pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from archipel.bundle import Bundle
from archipel.errors import RuntimeProgramError


class Session:
    """One program's graph, ready to run."""

    def __init__(self, name: str, native: Any, error_types: tuple[type[Exception], ...], keep: object = None) -> None:
        self.name = name
        self.native = native
        self._errors = error_types
        # Replaced initializers stay the caller's memory: ONNX Runtime only points to them.
        self._keep = keep
        self._run = native.run

    def run(self, outputs: Sequence[str], feed: Mapping[str, Any]) -> list[np.ndarray]:
        """Feed arrays (or values made by `bound_value`), get arrays in the order of `outputs`."""
        try:
            return self._run(outputs, feed)  # type: ignore[no-any-return]
        except self._errors as error:
            raise _failed(self.name, "cannot be run", error) from None

    def run_bound(self, binding: Any) -> None:
        try:
            self.native.run_with_iobinding(binding)
        except self._errors as error:
            raise _failed(self.name, "cannot be run", error) from None


class Sessions:
    """The sessions of one bundle. `threads` is the number of threads inside one operator."""

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        self._bundle = bundle
        self._threads = threads
        self._ready: dict[str, Session] = {}

    def get(self, name: str) -> Session:
        """The session of program `name`, from the second call on the same one. Raises RuntimeProgramError."""
        session = self._ready.get(name)
        if session is None:
            session = self._ready[name] = self.open(name)
        return session

    def open(self, name: str, initializers: Mapping[str, np.ndarray] | None = None) -> Session:
        """A new session in which `initializers` (external data of the graph, by name) have other values."""
        ort = _onnxruntime()
        program = self._bundle.program(name)
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        errors = error_types()
        keep: list[Any] = []
        try:
            if initializers:
                # Not add_initializer: that one lets constant folding see the graph's old values.
                keep = [ort.OrtValue.ortvalue_from_numpy(array) for array in initializers.values()]
                options.add_external_initializers(list(initializers), keep)
            path = str(self._bundle.program_path(name))
            native = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except errors as error:
            raise _failed(name, "cannot be loaded", error) from None
        for side, ports, there in (
            ("inputs", program.inputs, native.get_inputs()),
            ("outputs", program.outputs, native.get_outputs()),
        ):
            declared, real = {port.name for port in ports}, {value.name for value in there}
            if declared != real:
                raise RuntimeProgramError(
                    f"program {name!r}: the manifest and the graph disagree about its {side}: "
                    f"only one of them has {sorted(declared ^ real)}; convert the bundle again"
                )
        return Session(name, native, errors, keep)


def bound_value(array: np.ndarray) -> Any:
    """ONNX Runtime's view of `array`: no copy, and it keeps the array alive. The array must be contiguous."""
    return _onnxruntime().OrtValue.ortvalue_from_numpy(array)


def _failed(name: str, what: str, error: Exception) -> RuntimeProgramError:
    text = " ".join(str(error).split())
    return RuntimeProgramError(f"program {name!r} {what}: ONNX Runtime says: {text[:500]}")


@cache
def _onnxruntime() -> Any:
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


@cache
def error_types() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises: its own exceptions share no base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    types = [value for value in vars(native).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*types, RuntimeError, ValueError)
