"""ONNX's element types as PyTorch's, and arrays as tensors.

PyTorch computes little in unsigned types of 16 to 64 bits. Their values live in int64 (int32 for 16 bits), and what may
leave their range is cut off after it was computed (`wrap`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from archipel.errors import TrainingError

_T = ir.DataType
TYPES: dict[ir.DataType, torch.dtype] = {
    _T.FLOAT: torch.float32,
    _T.DOUBLE: torch.float64,
    _T.FLOAT16: torch.float16,
    _T.BFLOAT16: torch.bfloat16,
    _T.BOOL: torch.bool,
    _T.INT8: torch.int8,
    _T.INT16: torch.int16,
    _T.INT32: torch.int32,
    _T.INT64: torch.int64,
    _T.UINT8: torch.uint8,
    _T.UINT16: torch.int32,
    _T.UINT32: torch.int64,
    _T.UINT64: torch.int64,
    # Values of four bits are held in the next larger type.
    _T.INT4: torch.int8,
    _T.UINT4: torch.uint8,
}
_BITS = {_T.UINT4: 4, _T.UINT16: 16, _T.UINT32: 32}
# What leaves a module has the type that the graph declares.
OUTSIDE = {_T.UINT16: torch.uint16, _T.UINT32: torch.uint32, _T.UINT64: torch.uint64}


def torch_dtype(dtype: ir.DataType) -> torch.dtype:
    """The type of the tensor that holds values of an ONNX type. Raises TrainingError for one PyTorch cannot hold."""
    found = TYPES.get(dtype)
    if found is None:
        raise TrainingError(f"PyTorch has no tensors of {dtype.name}")
    return found


def wrap(tensor: torch.Tensor, dtype: ir.DataType) -> torch.Tensor:
    """The lower bits of a result, where the type that holds it has more of them than the graph's type."""
    if dtype is _T.INT4:
        return ((tensor + 8) & 15) - 8
    bits = _BITS.get(dtype)
    return tensor if bits is None else tensor & (2**bits - 1)


def hold(tensor: torch.Tensor, dtype: ir.DataType) -> torch.Tensor:
    """A tensor of an unsigned type, or one that has its values already, in the type that holds them."""
    return wrap(tensor.to(torch_dtype(dtype)), dtype)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor with its own copy of the array's content. Raises TrainingError for types that PyTorch cannot hold."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    if array.dtype.kind == "V" or array.dtype.name in ("int4", "uint4"):
        return torch.from_numpy(array.astype(np.uint8 if array.dtype.name == "uint4" else np.int8))
    if array.dtype.name in ("uint16", "uint32", "uint64"):
        return torch.from_numpy(array.astype(np.int32 if array.dtype.name == "uint16" else np.int64))
    if array.dtype.kind not in "biuf":
        raise TrainingError(f"PyTorch has no tensors of {array.dtype.name}")
    return torch.from_numpy(np.array(array, order="C"))


def to_array(tensor: torch.Tensor, dtype: ir.DataType) -> np.ndarray:
    """A copy of a tensor's content as an array of an ONNX type."""
    tensor = tensor.detach().to("cpu")
    tensor = tensor.to(torch.float32) if tensor.dtype is torch.bfloat16 else tensor  # NumPy itself has no bfloat16
    return np.array(tensor.numpy()).astype(dtype.numpy(), copy=False)
