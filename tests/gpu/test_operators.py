"""Every lowering on a GPU: it computes what it computes on the CPU, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel import Model
from archipel.training.cloud import TorchModule
from tests.support.fixtures.gradient_cases import all_cases

pytestmark = pytest.mark.gpu

CASES = all_cases()


@pytest.mark.parametrize("key", sorted(CASES), ids=lambda key: key[1])
def test_operator(key: tuple[str, str]) -> None:
    @settings(max_examples=4, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(CASES[key])
        precise = np.float32 if case.single else np.float64
        model = Model.from_proto(case.model(precise))
        module = TorchModule(model)
        arrays = case.arrays(precise)
        if any(array.dtype.kind == "V" for array in arrays.values()):
            return  # four bits: no tensors
        inputs = [torch.from_numpy(np.array(arrays[info.name])) for info in model.inputs]
        expected = module(*inputs)
        found = module.cuda()(*(each.cuda() for each in inputs))
        for ours, theirs in zip(_all(found), _all(expected)):
            assert ours.device.type == "cuda"
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)

    check()


def _all(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
