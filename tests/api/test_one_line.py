"""What other libraries say becomes one line, without the place in their source."""

from __future__ import annotations

import pytest

from archipel.library_errors import one_line

# As ONNX Runtime 1.24 and onnx 1.22 say it, and what is left.
TEXTS = [
    (
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running GatherElements node. Name:'g' "
        "Status Message: /onnxruntime_src/onnxruntime/core/providers/cpu/tensor/gather_elements.cc:150 void "
        "onnxruntime::core_impl(const Tensor*, const Tensor*, Tensor*, int64_t, concurrency::ThreadPool*) "
        "[with Tin = long int; int64_t = long int] GatherElements op: Out of range value in index tensor",
        "running GatherElements node. Name:'g' Status Message: GatherElements op: Out of range value in index tensor",
    ),
    (
        "[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/x/model.onnx failed:Node (MatMul_0) Op (MatMul) "
        "[ShapeInferenceError] Incompatible dimensions for matrix multiplication",
        "Node (MatMul_0) Op (MatMul) [ShapeInferenceError] Incompatible dimensions for matrix multiplication",
    ),
    (
        "/project/onnx/version_converter/helper.cc:68: assertNotParams: Assertion `dim.is_int` failed: N Dimension "
        "is a param instead of an int.",
        "Assertion `dim.is_int` failed: N Dimension is a param instead of an int",
    ),
    (
        "Unrecognized attribute: alfa for operator Gemm\n\n==> Context: Bad node spec for node. Name: n OpType: Gemm",
        "Unrecognized attribute: alfa for operator Gemm ==> Context: Bad node spec for node. Name: n OpType: Gemm",
    ),
]


@pytest.mark.parametrize(("text", "left"), TEXTS)
def test_of_cpp_the_meaning_is_left(text: str, left: str) -> None:
    assert one_line(RuntimeError(text)) == left


def test_it_is_short_and_never_empty() -> None:
    assert len(one_line("long " * 1000)) <= 300
    assert one_line(KeyError()) == "KeyError"
