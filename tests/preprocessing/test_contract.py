"""What every transform must do, whatever it computes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from archipel.graph import check_model
from archipel.preprocessing import TRANSFORMS, Raw, chain, from_settings, to_settings
from archipel.training.cloud import TorchModule
from tests.preprocessing.cases import CASES, Case, run

each_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


def test_every_kind_has_a_case() -> None:
    covered = {type(case.transforms[-1]) for case in CASES.values()} | {Raw}
    assert covered == set(TRANSFORMS)


@each_case
@pytest.mark.sampled(every=6)
def test_engines_sizes_and_batches_agree(case: Case) -> None:
    free = chain([case.raw, *case.transforms])
    check_model(free.ir)
    answer = run(free, case.examples)
    # A second engine, in the same type and in float64.
    for floats in ("float32", "float64"):
        program = chain([case.raw, *case.transforms], floats=floats)
        (other,) = ReferenceEvaluator(program.to_bytes()).run(None, {"input": case.examples})
        for found in (answer, run(program, case.examples)):
            assert np.abs(found - other).max() <= 1e-5 * max(1.0, np.abs(other).max()), floats
        assert other.dtype.name in (floats, case.raw.dtype, "int64")
    # Sizes known beforehand.
    fixed = chain([Raw(case.raw.dtype, case.examples.shape), *case.transforms])
    np.testing.assert_allclose(run(fixed, case.examples), answer, rtol=1e-6, atol=1e-6)
    assert fixed.outputs[0].shape == answer.shape
    declared = free.outputs[0].shape
    assert declared[0] == "batch"
    assert len(declared) == answer.ndim
    assert all(not isinstance(d, int) or d == size for d, size in zip(declared, answer.shape))
    # An example alone.
    np.testing.assert_allclose(run(free, case.examples[1:2]), answer[1:2], rtol=1e-5, atol=1e-5)


@each_case
@pytest.mark.sampled(every=6)
def test_pytorch_gives_the_same(case: Case) -> None:
    """The cloud's engine, with sizes that are known and a batch that is not."""
    model = chain([Raw(case.raw.dtype, ("batch", *case.examples.shape[1:])), *case.transforms])
    answer, other = run(model, case.examples), TorchModule(model)(torch.tensor(case.examples)).numpy()
    assert other.dtype == answer.dtype
    assert np.abs(answer - other).max() <= 1e-5 * max(1.0, np.abs(answer).max())


@each_case
def test_settings_say_the_same(case: Case) -> None:
    transforms = [case.raw, *case.transforms]
    tables = msgspec.json.decode(msgspec.json.encode(to_settings(transforms)))
    assert from_settings(tables) == transforms
