"""The accelerators that PyTorch can train on in this process."""

from __future__ import annotations

from archipel.errors import MissingExtraError


def describe() -> str:
    """PyTorch's version and its accelerators in one line. Raises MissingExtraError without PyTorch."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.__version__}: {', '.join(names) if names else 'no accelerator, trains on the CPU'}"
