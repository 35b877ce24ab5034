"""PyTorch as an engine of the runtime: a bundle's programs as `TorchModule`s, on a CPU, CUDA or MPS device.

A program is the graph that ONNX Runtime would run, lowered operator by operator. What the runtime keeps from step to
step (parameters, optimizer state) stays on the device. Needs PyTorch and onnx (`pip install 'archipel[cloud]'`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from archipel.engine_registry import Refusal
from archipel.errors import ArchipelError, RuntimeProgramError
from archipel.graph.importing.bundled import read_bundled
from archipel.graph.importing.loading import normalize
from archipel.graph.model import Model
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.delegates import NodePlacement, ProgramPlacement
from archipel.lite_runtime.engines.program_session import Arrays, ProgramSession
from archipel.lite_runtime.out_of_range import index_error
from archipel.training.cloud.device import tf32
from archipel.training.cloud.graphs.index_limits import check_indices, find_index_limits
from archipel.training.cloud.graphs.recognizing import recognize_gradients
from archipel.training.cloud.graphs.torch_module import TorchModule
from archipel.training.cloud.ops.types import to_torch

NAME = "torch"
_OPTIONS = ("device", "tf32")
_PLAIN = frozenset({"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"})
"""NumPy types that a tensor shares memory with."""


def open_program(
    name: str, path: Path, threads: int, options: Mapping[str, str], initializers: Arrays | None = None
) -> TorchSession:
    """Open a program of a bundle.

    Arguments:
        name: the program's.
        path: its graph, with the bundle's weights beside it.
        threads: the number of threads inside one operator, on the CPU.
        options: `device`, "auto" (by default), "cpu", "cuda", "cuda:1" or "mps"; `tf32`, "1" lets GPUs round the
            factors of float32 products to 10 bits, "0" (by default) does not.
        initializers: replace those of the graph, by name.

    Raises Refusal for a graph that PyTorch cannot run, an unknown option, and a device that is not there.
    """
    for option in options:
        if option not in _OPTIONS:
            raise Refusal(f"it has no option {option!r}; it takes {', '.join(_OPTIONS)}")
    device, rounds = find_device(options.get("device", "auto")), options.get("tf32", "0")
    if rounds not in ("0", "1"):
        raise Refusal(f"tf32 is 0 or 1, not {rounds!r}")
    try:
        # Without parameters: what a program trains are inputs, and constants are computed once.
        model = Model(normalize(read_bundled(path.parent, path.name), parameters=()))
        stored = model.ir.graph.initializers
        for tensor, array in (initializers or {}).items():
            if tensor not in stored:
                raise Refusal(f"initializer {tensor!r} cannot be replaced there")
            stored[tensor].const_value = ir.tensor(array, name=tensor)
        return TorchSession(name, model, threads, device, rounds == "1")
    except ArchipelError as error:
        raise Refusal(str(error)) from None
    except _ERRORS as error:
        raise Refusal(one_line(error)) from None


def find_device(name: str) -> torch.device:
    """The device that "auto", "cpu", "cuda", "cuda:1" or "mps" is. Raises Refusal for one that is not there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device) + 1
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        confined = " (CUDA does not start with isolated=True)" if name.startswith("cuda") else ""
        raise Refusal(
            f"device {name!r}: {one_line(error)}; name 'cpu', 'cuda', 'cuda:1', 'mps' or 'auto'{confined}"
        ) from None
    return device


@dataclass
class _Held:
    """A kept array's tensor on the device; None before a run has written it."""

    tensor: torch.Tensor | None
    newer: bool = False
    """Whether a run has written it since the array was."""


class TorchSession(ProgramSession):
    """A program in PyTorch.

    Arguments:
        name: the program's.
        model: its graph.
        threads: the number of threads inside one operator, on the CPU; 0: PyTorch's own.
        device: where it runs.
        tf32: whether GPUs may round the factors of float32 products to 10 bits.
    """

    holds = True

    def __init__(self, name: str, model: Model, threads: int, device: torch.device, tf32: bool = False) -> None:
        self.name, self._tf32 = name, tf32
        self.native = TorchModule(recognize_gradients(model)).requires_grad_(False).to(device)
        self.inputs = frozenset(info.name for info in model.inputs)
        self.outputs = frozenset(info.name for info in model.outputs)
        self.device = device
        self._threads = threads
        self._in_order = [info.name for info in model.inputs]
        self._limits = find_index_limits(model) if device.type == "cuda" else {}
        self._places = {info.name: index for index, info in enumerate(model.outputs)}

    def run(self, outputs: Sequence[str], feed: Mapping[str, Any]) -> list[np.ndarray]:
        with self._reporting():
            results = self._compute([self._tensor(feed[name], name) for name in self._in_order])
            # Copies: a result may be the memory of an input or of a constant.
            return [to_numpy(results[self._places[name]]).copy() for name in outputs]

    def run_held(self, outputs: Sequence[str], feed: Mapping[str, Any]) -> list[torch.Tensor]:
        """As `run`, with tensors on the device as results, which nothing changes; `feed` may have such tensors."""
        with self._reporting():
            tensors = [self._tensor(feed[name], name) for name in self._in_order]
            shared = {
                _address(tensors[k]) for k, name in enumerate(self._in_order) if isinstance(feed[name], np.ndarray)
            }
            results = self._compute(tensors)
            chosen = [results[self._places[name]] for name in outputs]
            # A result may be the memory of a caller's array.
            return [each.clone() if _address(each) in shared else each for each in chosen]

    def bind(
        self, inputs: Arrays, outputs: Arrays, bound: dict[int, Any] | None = None, kept: Collection[str] = ()
    ) -> Callable[[], None]:
        held: dict[int, Any] = {} if bound is None else bound
        with self._reporting():
            sources = [self._source(name, inputs[name], held, name in kept) for name in self._in_order]
        places = [self._places[name] for name in outputs]
        targets: list[np.ndarray | _Held] = []
        for name, array in outputs.items():
            targets.append(held.setdefault(id(array), _Held(None)) if name in kept else array)
        # On the CPU a result may be the memory of a buffer, which the caller fills anew before the next run.
        shared = {_address(each) for each in sources if isinstance(each, torch.Tensor)}

        def run() -> None:
            with self._reporting():
                results = self._compute([_present(source) for source in sources])
                for place, target in zip(places, targets):
                    if isinstance(target, _Held):
                        result = results[place]
                        target.tensor = result.clone() if _address(result) in shared else result
                        target.newer = True
                    else:
                        target[...] = to_numpy(results[place])

        return run

    def fetch(self, arrays: Iterable[np.ndarray], bound: dict[int, Any]) -> None:
        for array in arrays:
            held = bound.get(id(array))
            if held is not None and held.newer:
                array[...] = to_numpy(held.tensor)
                held.newer = False

    def send(self, arrays: Iterable[np.ndarray], bound: dict[int, Any]) -> None:
        for array in arrays:
            bound[id(array)].tensor, bound[id(array)].newer = to_torch(array).to(self.device), False

    def value(self, array: np.ndarray) -> Any:
        return to_torch(array).to(self.device)

    def placement(self) -> ProgramPlacement:
        graph = self.native.source.ir.graph
        nodes = (NodePlacement(node.name or "", node.op_type, NAME) for node in graph)
        return ProgramPlacement(self.name, (NAME,), tuple(nodes))

    def _compute(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.inference_mode(), _threads(self._threads), tf32(self._tf32):
            results = self.native(*tensors)
        return results if isinstance(results, tuple) else (results,)

    def _tensor(self, value: Any, name: str) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        array = np.asarray(value, order="C")
        if name in self._limits:
            check_indices(name, array, self._limits[name])
        return _view(array).to(self.device) if array.dtype.name in _PLAIN else to_torch(array).to(self.device)

    def _source(self, name: str, array: np.ndarray, held: dict[int, Any], keep: bool) -> Any:
        """What a run reads: a held tensor, one that shares the array's memory, or a function that makes one."""
        if keep:
            found = held.setdefault(id(array), _Held(None))
            if found.tensor is None:
                found.tensor = to_torch(array).to(self.device)
            return found
        if self.device.type == "cpu" and array.dtype.name in _PLAIN and array.flags.writeable:
            return torch.from_numpy(array)
        return lambda: self._tensor(array, name)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except ArchipelError:
            raise
        except _ERRORS as error:
            where, text = f"program {self.name!r}", " ".join(str(error).split())
            raise index_error(where, text) or RuntimeProgramError(
                f"{where} cannot be run: PyTorch says: {one_line(error)}"
            ) from None


_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, OSError, LookupError)
"""What PyTorch, and the functions of onnx that read a graph, raise."""


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's content, on the CPU."""
    tensor = tensor.detach().to("cpu")
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ir.DataType.BFLOAT16.numpy())
    return tensor.numpy()


def _view(array: np.ndarray) -> torch.Tensor:
    # Of an array that is read-only PyTorch warns that it might be written; nothing writes inputs.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _present(source: Any) -> Any:
    if isinstance(source, torch.Tensor):
        return source
    return source.tensor if isinstance(source, _Held) else source()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else -1


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """PyTorch has one number of threads for the process, which belongs to the caller."""
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
