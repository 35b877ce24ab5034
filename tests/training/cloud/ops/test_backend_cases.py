"""The node tests that the ONNX package brings along, through `TorchModule`: right, or refused for a reason below."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.backend.test.case.node import collect_testcases

from archipel import Model
from archipel.errors import ArchipelError, ModelImportError
from archipel.training.cloud.graphs.torch_module import TorchModule

# What TorchModule refuses, by what its error says.
NO_LOWERING = {
    "texts": {"TfIdfVectorizer"},
    "sequences and optionals": {"OptionalGetElement", "OptionalHasElement"},
    "optimizers of ONNX's own": {"Adagrad", "Adam", "Momentum"},
    "trees and tables of another domain": {"ArrayFeatureExtractor", "Binarizer", "TreeEnsemble"},
    "a preview": {"FlexAttention"},
    "pictures from files": {"ImageDecoder"},
    "no gradient rule, and in no network so far": {"DeformConv", "MelWeightMatrix", "NonMaxSuppression"},
}  # fmt: skip
REASONS = (
    r"PyTorch has no tensors of (FLOAT8|STRING|COMPLEX)",
    r"PyTorch needs .* as a constant",
    r"Resize .* PyTorch needs",  # scales that are inputs
    r"the length of .* is not known",
    r"the shape of .* is not known",  # of a result of axes that are computed
)
# Positions count in the shape that is given, as in ONNX Runtime; this case has them in the shape that follows.
KNOWN = {"test_maxunpool_export_with_output_shape"}
RANDOM = re.compile("bernoulli|training_dropout")  # each engine draws its own


def as_array(value: Any) -> np.ndarray:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    if array.dtype.name in ("int4", "uint4"):  # held in the next larger type
        return torch.from_numpy(array.astype(np.int8 if array.dtype.name == "int4" else np.uint8))
    return torch.from_numpy(np.array(array))


def compare(ours: torch.Tensor, theirs: np.ndarray) -> None:
    expected = as_tensor(theirs)
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(ours.dtype, 1e-3)
    if not ours.is_floating_point() or ours.dtype is torch.float64:
        np.testing.assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-3, atol=1e-5)
    else:
        np.testing.assert_allclose(ours.float().numpy(), expected.float().numpy(), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the cases' own arithmetic
def test_every_node_test_is_right_or_refused_for_a_known_reason() -> None:
    known = set().union(*NO_LOWERING.values())
    refused, wrong, right = set(), defaultdict(list), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in (each for each in cases if each.name not in KNOWN):
        try:
            model = Model.from_proto(case.model)
        except ModelImportError:
            continue  # its own tests
        try:
            module = TorchModule(model)
        except ArchipelError as error:
            missing = re.match(r"PyTorch does not run (?:\S+::)?(\w+)", str(error))
            if missing:
                refused.add(missing[1])
            if not (missing[1] in known if missing else any(re.search(reason, str(error)) for reason in REASONS)):
                wrong[case.name].append(str(error))
            continue
        for inputs, outputs in case.data_sets:
            given = {info.name: as_array(x) for info, x in zip(case.model.graph.input, inputs)}
            try:
                with torch.no_grad():
                    found = module(*(as_tensor(given[name]) for name in module.input_names))
                for ours, theirs in zip(found if isinstance(found, tuple) else (found,), outputs, strict=True):
                    if not RANDOM.search(case.name):
                        compare(ours, as_array(theirs))
                right += 1
            except (AssertionError, RuntimeError, TypeError, ValueError, IndexError) as error:
                wrong[case.name].append(" ".join(f"{type(error).__name__}: {error}".split())[:200])
    assert not wrong, "\n".join(f"{name}: {errors[0]}" for name, errors in wrong.items())
    assert refused == known, "a lowering was added: take the operator out of the list"
    assert right > 1400
