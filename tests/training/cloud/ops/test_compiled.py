"""torch.compile sees one whole graph: nothing that a lowering emits asks for the content of a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_cases.case import Case
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from archipel import Model
from archipel.autodiff import RULES
from archipel.training.cloud import TorchModule
from archipel.training.cloud.ops import LOWERINGS

# What these compute has a shape, or takes a way, that follows from what a tensor holds.
RECURRENT = ("LSTM", "GRU", "RNN")  # stay PyTorch's own kernels, between two graphs
FROM_CONTENT = {("", op_type) for op_type in ("CumSum", "Expand", "If", "Loop", "Reshape", "Slice")}
OPERATORS = sorted(op_type for domain, op_type in (LOWERINGS.keys() & RULES.keys()) - FROM_CONTENT if domain == "")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
@pytest.mark.parametrize(
    ("op_type", "count"), [("Dropout", 1), *(pytest.param(op, 4, marks=pytest.mark.slow) for op in OPERATORS)]
)
@pytest.mark.sampled(every=4)
def test_one_graph(op_type: str, count: int, gradient_cases: dict) -> None:
    @settings(max_examples=count, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(gradient_cases["", op_type])
        # The shape follows from axes that are no constants.
        assume(not op_type.startswith("Reduce") or len(case.inputs) < 2 or 1 in case.constants)
        compare(case)

    check()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind == "V":  # PyTorch has no tensors of four bits
        return torch.from_numpy(array.astype(np.uint8 if array.dtype.name == "uint4" else np.int8))
    return torch.from_numpy(array)


def compare(case: Case) -> None:
    precise = np.float32 if case.single else np.float64
    model = Model.from_proto(case.model(precise))
    module, arrays = TorchModule(model), case.arrays(precise)
    inputs = [as_tensor(arrays[port.name]) for port in model.inputs]
    torch.compiler.reset()
    found = torch.compile(module, backend="eager", fullgraph=case.op_type not in RECURRENT)(*inputs)
    torch.testing.assert_close(found, module(*inputs))
