"""No lowering makes tensors on another device than the module's, and few ask what a tensor holds.

On the device "meta" tensors have shapes and no content: what mixes devices there, or reads a content, is an error.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from gradient_cases.case import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel import Model
from archipel.autodiff import RULES
from archipel.training.cloud import TorchModule
from archipel.training.cloud.ops import LOWERINGS

READS = re.compile("item\\(\\) cannot be called on meta|Cannot copy out of meta")
# They read axes, sizes or conditions where these are computed by the graph.
FROM_CONTENT = {"CumSum", "Expand", "If", "Loop", "Pad", "Reshape", "Slice", "Split", "Tile", "TopK", "Trilu"}


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "op_type", sorted(op_type for domain, op_type in LOWERINGS.keys() & RULES.keys() if domain == "")
)
@pytest.mark.sampled(every=6)
def test_device(op_type: str, count: int, gradient_cases: dict) -> None:
    @settings(max_examples=count, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(gradient_cases["", op_type])
        try:
            compare(case)
        except (RuntimeError, NotImplementedError) as error:
            reads = op_type in FROM_CONTENT or (op_type.startswith("Reduce") and 1 not in case.constants)
            if not (reads and READS.search(str(error))):
                raise

    check()


def compare(case: Case) -> None:
    precise = np.float32 if case.single else np.float64
    model = Model.from_proto(case.model(precise))
    module, arrays = TorchModule(model), case.arrays(precise)
    inputs = [as_tensor(arrays[port.name]) for port in model.inputs]
    expected = module(*inputs)
    found = module.to("meta")(*[value.to("meta") for value in inputs])
    for ours, theirs in zip(*(value if isinstance(value, tuple) else (value,) for value in (found, expected))):
        assert ours.is_meta
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind == "V":  # PyTorch has no tensors of four bits
        return torch.from_numpy(array.astype(np.uint8 if array.dtype.name == "uint4" else np.int8))
    return torch.from_numpy(array)
