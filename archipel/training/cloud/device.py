"""Where and in which precision a training computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from archipel.errors import MissingExtraError, TrainingError
from archipel.training.cloud.config import Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


def require_torch() -> None:
    """Raises MissingExtraError without PyTorch."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error


def choose_device(name: str) -> torch.device:
    """The device of this name; "auto" is CUDA, MPS or the CPU, whichever is there first.

    Raises TrainingError for a device that is not there.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(device.type, True)
    if not there:
        raise TrainingError(f"device: PyTorch {torch.__version__} finds no {name} here; choose 'cpu' or 'auto'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TrainingError(
            f"device: there is no {name}; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return device


class Autocast:
    """Products in 16 bits where the precision asks for it, and loss scaling for fp16 (Micikevicius et al. 2018)."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        import torch

        if precision == "auto":
            on_gpu = device.type == "cuda"
            precision = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if on_gpu else "float32"
        self.precision = precision
        self._device = device
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.scaler.scale(torch.zeros((), device=device))  # makes the scale, which the trainer multiplies with itself

    def __call__(self) -> AbstractContextManager[Any]:
        """A context for the forward pass."""
        import torch

        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """A context in which PyTorch uses so many threads on the CPU, if there is a count."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """A context in which GPUs may round what float32 products multiply to 10 bits (TF32), or may not.

    By itself PyTorch allows it in convolutions and not in products of matrices.
    """
    import torch

    backends: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = allowed
    try:
        yield
    finally:
        for backend, value in zip(backends, before):
            backend.allow_tf32 = value


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the device or this machine has too little memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def memory_format(module: nn.Module, device: torch.device) -> torch.memory_format:
    """Channels last where there are 2-D convolutions, which is a third faster for those of `archipel.models`."""
    import torch
    from torch import nn

    convolves = getattr(module, "convolves", False) or any(isinstance(part, nn.Conv2d) for part in module.modules())
    return torch.channels_last if convolves and device.type in ("cpu", "cuda") else torch.contiguous_format
