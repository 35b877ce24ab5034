"""The ONNX package's own node tests: they arrive with the outputs they declare, and their gradients are right."""

from __future__ import annotations

import json
import os
import re
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from backend_cases import Result, check, node_tests, qualifying
from coverage_table import KNOWN, PAGE, lowering_of, page, results, rules
from engines_table import ROWS, TOLERANCE, engines_part
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.reference import ReferenceEvaluator
from sequence_cases import sequence_results

from archipel import Model
from archipel.errors import ModelImportError

TestCase.__test__ = False  # what pytest would take for tests to collect

RUN = "run python scripts/operators.py"

# Their outputs are random, or neither runtime gives those that the package declares, before and after import alike.
UNDEFINED = re.compile(
    "test_(bernoulli|training_dropout|.?dft|stft|cast.*_FLOAT8|cast.*_to_BFLOAT16|maxunpool_export_with_output_shape|"
    "range_bfloat16.*_expanded|resize_downsample_scales_(linear|cubic)_align_corners)"
)


@pytest.mark.sampled(every=8)
def test_gradients() -> None:
    """The first case of each operator: if it is differentiated, it is right."""
    assert wrong(results(per_operator=1)) == {}


@pytest.mark.slow
def test_gradients_of_all_cases() -> None:
    """What is known to be wrong still is, or it leaves the list."""
    assert wrong(results()) == {}
    assert set(KNOWN) <= {result.name for result in results() if result.status == "failed"}
    assert sum(result.status == "passed" for result in results()) > 500


def wrong(found: tuple[Result, ...]) -> dict[str, str]:
    return {result.name: result.reason for result in found if result.status == "failed" and result.name not in KNOWN}


def test_the_page_knows_every_rule() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (\w+\.py) \|", PAGE.read_text(), re.M))
    assert rows == rules(), RUN


def test_the_page_knows_every_lowering() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (?:\w+\.py|\*\w+\*) \| (\S+) \|", PAGE.read_text(), re.M))
    assert len(rows) > 100
    for op_type, file in rows.items():
        assert (None if file.startswith("*") else file) == lowering_of(op_type), (op_type, RUN)


def test_the_page_has_every_network_and_what_is_measured() -> None:
    text = PAGE.read_text()
    assert text.endswith(engines_part()), RUN
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()[1:]]
    assert {row["case"] for row in rows} == {
        *("MLP", "LeNet", "FedAvg CNN", "digits CNN", "ResNet-8", "DS-CNN", "MobileNetV2", "1D-CNN"),
        *("LSTM", "GRU", "Transformer", "autoencoder", "U-Net"),
    }
    assert {row["case"] for row in rows if row["engine"] == "OpenVINO"} == {row["case"] for row in rows}
    # What stands in the way is an operator or a form, in the engine's words; a loss that differs is no reason.
    assert all(row["reason"] or row["error"] <= TOLERANCE for row in rows)


@pytest.mark.slow
def test_the_page_is_what_the_results_say() -> None:
    text = PAGE.read_text()
    if f"{onnx.__version__}):" not in text:
        reason = f"docs/operators.md is of another onnx than {onnx.__version__}"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}; {RUN}")
        pytest.skip(reason)
    assert text == page(results(), sequence_results()), RUN


@pytest.mark.sampled(every=4)
def test_control_flow_sequences_and_optionals() -> None:
    """They give what the package declares, or are refused: a loop over batches, and items of several ranks."""
    found = sequence_results()
    refused = {result.name for result in found if result.status == "refused"}
    assert {result.name: result.reason for result in found if result.status == "failed"} == {}
    assert refused == {"test_scan_sum", "test_loop16_seq_none"}
    assert {"If", "Loop", "Scan", "SequenceMap", "OptionalGetElement"} <= {result.op_type for result in found}


@pytest.mark.sampled(every=4)
def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from archipel.autodiff import RULES

    monkeypatch.setitem(RULES, ("", "Exp"), lambda ctx: [ctx.cotangent])
    case = next(case for case in qualifying() if case.name == "test_exp")
    assert check(case) == Result(case.name, "Exp", "failed", check(case).reason)
    assert "differs from finite differences" in check(case).reason


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=8)
def test_imports_keep_the_meaning(every: int) -> None:
    """Cases of whatever opset: imported, they compute what the package says, or they are refused by name."""
    refused = []
    for case in node_tests()[::every]:
        if UNDEFINED.match(case.name):
            continue
        try:
            model = Model.from_proto(case.model)
        except ModelImportError as error:
            refused.append((case, str(error)))
            continue
        inputs, expected = ([_array(value) for value in values] for values in case.data_sets[0])
        taken = {port.name for port in model.inputs}
        feed = {p.name: v for p, v in zip(case.model.graph.input, inputs) if p.name in taken}
        found = _run(model.to_bytes(), feed)
        for ours, theirs in zip(found, expected, strict=True):
            assert np.shape(ours) == np.shape(theirs), case.name
            if theirs.dtype.kind == "f":
                close = np.allclose(ours, theirs, rtol=1e-3, atol=1e-5, equal_nan=True)
                assert close, case.name
            else:
                assert np.array_equal(ours, theirs), case.name
    assert len(refused) * every < 0.1 * len(node_tests())
    for case, message in refused:
        operators = {node.op_type for node in case.model.graph.node}
        assert "is not a tensor but" in message or any(op_type in message for op_type in operators), message


def _array(value: object) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _run(model: bytes, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feed)
    except Exception:  # noqa: BLE001  (no kernel, or a type that NumPy has not: onnx.reference has it)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, feed)]
