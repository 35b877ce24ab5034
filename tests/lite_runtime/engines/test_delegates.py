from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import onnxruntime as ort
import pytest

from archipel.bundle import Bundle
from archipel.bundle.roles import ProgramKind
from archipel.errors import DelegateError, RuntimeProgramError
from archipel.lite_runtime.engines import delegates as d
from archipel.lite_runtime.engines.sessions import Sessions

W = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]], np.float32)
PREDICT = "predict (float[n, 3] x, float[3, 2] w) => (float[n, 2] y) { [first] p = MatMul(x, w) \n y = Relu(p) }"
TRAIN = """train (float[n, 3] x, float[3, 2] w) => (float[3, 2] w_new) {
    one = Constant <value_float = 1.0> ()
    w_new = Add(w, one)
}"""


@pytest.fixture
def bundle(of_two_programs: Callable[[str, str, np.ndarray], Bundle]) -> Bundle:
    return of_two_programs(PREDICT, TRAIN, W)


def feed() -> dict[str, np.ndarray]:
    return {"x": np.ones((4, 3), np.float32), "w": W}


def test_every_name_is_a_provider_of_onnx_runtime() -> None:
    assert set(d.PROVIDERS.values()) <= set(ort.get_all_providers())
    for names in d.AUTO.values():
        assert set(names) < set(d.PROVIDERS)
        assert "cpu" not in names


def test_auto_is_for_what_runs_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    found = d.preferences("auto")
    assert set(found) == set(get_args(ProgramKind))
    for kind, preference in found.items():
        names = [each.name for each in preference.delegates]
        assert names == (["cuda", "migraphx", "cann", "openvino", "qnn"] if kind in d._AUTO_KINDS else [])
        assert preference.fallback
    monkeypatch.setattr(sys, "platform", "emscripten")
    assert all(preference.delegates == () for preference in d.preferences("auto").values())


def test_lists_are_for_all_programs_and_mappings_for_their_kinds() -> None:
    options = {"backend_path": "libQnnHtp.so", "profiling": True, "device": 2}
    for chosen in (["xnnpack", ("qnn", options), "cpu"], {"train": ["xnnpack", ("qnn", options), "cpu"]}):
        found = d.preferences(chosen)  # type: ignore[arg-type]
        train = found["train"]
        assert train.delegates == (
            d.Delegate("xnnpack"), d.Delegate("qnn", {"backend_path": "libQnnHtp.so", "profiling": "1", "device": "2"})
        )  # fmt: skip
        assert train.fallback
    assert found["predict"] == d.preferences("auto")["predict"]
    assert d.preferences("cpu")["predict"] == d.Preference((), fallback=True)
    assert d.preferences(["coreml"])["predict"] == d.Preference((d.Delegate("coreml"),), fallback=False)


@pytest.mark.parametrize(
    ("delegates", "text"),
    [
        (["gpu"], "'gpu' is not known; choose from acl, .*cpu, cuda,.* xnnpack"),
        (["azure", "cpu"], "'azure' is not known"),
        ([], "empty"),
        (["cpu", "cuda"], "name it last"),
        (["cuda", "cuda", "cpu"], "'cuda' is named twice"),
        ({"training": ["cpu"]}, "'training' is not a kind of program; those are predict, "),
        ({"train": ["gpu"]}, "'gpu' is not known"),
        ([("qnn", "libQnnHtp.so")], r"expected a name or \(name, options\)"),
        ([7], "expected a name or"),
    ],
)
def test_what_cannot_be_meant_is_an_error_at_once(bundle: Bundle, delegates: Any, text: str) -> None:
    with pytest.raises(DelegateError, match=text):
        Sessions(bundle, 1, delegates)


def test_a_missing_delegate_is_an_error_unless_the_cpu_may_take_over(bundle: Bundle) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this build has CUDA")
    with pytest.raises(DelegateError, match=r"'cuda': not in this build of ONNX Runtime, which has .*cpu.*add 'cpu'"):
        Sessions(bundle, 1, ["cuda"])
    with pytest.raises(DelegateError, match="'cuda'"):
        Sessions(bundle, 1, {"predict": ["cuda"]})
    sessions = Sessions(bundle, 1, [("cuda", {"device_id": 0}), "cpu"])
    [y] = sessions.get("predict").run(["y"], feed())
    np.testing.assert_allclose(y, np.maximum(feed()["x"] @ W, 0), rtol=1e-6)
    [skipped] = sessions.report().skipped
    assert (skipped.delegate, skipped.program) == ("cuda", "")
    assert "not in this build" in skipped.reason


def test_the_report_has_every_node_where_onnx_runtime_put_it(bundle: Bundle) -> None:
    sessions = Sessions(bundle, 1, "cpu")
    assert sessions.report() == d.DelegateReport({}, ())
    sessions.get("predict")
    report = sessions.report()
    assert list(report.programs) == ["predict"]
    placement = report.programs["predict"]
    assert placement.delegates == ("cpu",)
    if placement.nodes is None:
        pytest.skip("this version of ONNX Runtime does not tell")
    assert placement.nodes == (d.NodePlacement("first", "MatMul", "cpu"), d.NodePlacement("", "Relu", "cpu"))
    assert placement.counts() == {"cpu": 2}
    lines = report.table(nodes=True).splitlines()
    assert lines[0] == "predict: 2 nodes on cpu"
    assert re.fullmatch(r"  cpu +MatMul +first", lines[1])


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second provider that most builds really have, and that takes none of these nodes."""
    if "AzureExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this build has one provider only")
    monkeypatch.setitem(d.PROVIDERS, "azure", "AzureExecutionProvider")


@pytest.mark.usefixtures("azure")
def test_several_delegates_share_one_session(bundle: Bundle) -> None:
    sessions = Sessions(bundle, 1, ["azure", "cpu"])
    sessions.get("predict")
    placement = sessions.report().programs["predict"]
    assert placement.delegates == ("azure", "cpu")
    assert placement.counts() in ({"cpu": 2}, {})
    assert sessions.report().skipped == ()


@pytest.mark.usefixtures("azure")
def test_without_the_cpu_a_node_that_nobody_takes_is_an_error(
    bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DelegateError, match=r"'predict' cannot be run by the delegates alone: azure: .*add 'cpu'"):
        Sessions(bundle, 1, ["azure"]).get("predict")
    # ONNX Runtime's own fallback would have told standard output, and gone on.
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("azure")
def test_a_delegate_that_fails_is_left_out_and_the_others_stay(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    # ONNX Runtime refuses these two together, and cannot load either: as on a device whose driver is missing.
    monkeypatch.setitem(d.PROVIDERS, "rtx", "NvTensorRTRTXExecutionProvider")
    there = ["TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider", *ort.get_available_providers()]
    monkeypatch.setattr(ort, "get_available_providers", lambda: there)
    sessions = Sessions(bundle, 1, {"predict": ["tensorrt", "rtx", "azure", "cpu"], "train": ["cpu"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sessions.get("predict")
        sessions.get("train")
    report = sessions.report()
    assert report.programs["predict"].delegates == ("azure", "cpu")
    assert report.programs["train"].delegates == ("cpu",)
    reasons = {skipped.delegate: skipped for skipped in report.skipped}
    assert set(reasons) == {"tensorrt", "rtx"}
    assert {skipped.program for skipped in report.skipped} == {"predict"}
    assert "Cannot enable both" in reasons["rtx"].reason
    assert re.search("predict: not on .*: Cannot enable both", report.table())
    # What failed is not tried again: no warning, which is an error here.
    sessions.open("predict")


def test_a_graph_that_nobody_can_load_is_the_graphs_error(bundle: Bundle) -> None:
    bundle.program_path("predict").write_bytes(b"no graph")
    with pytest.raises(RuntimeProgramError, match="'predict' cannot be loaded"):
        Sessions(bundle, 1, "auto").get("predict")


def test_as_many_delegates_as_possible_in_their_order() -> None:
    a, b, c = (d.Delegate(name) for name in ("coreml", "xnnpack", "webgpu"))
    assert list(d.attempts([a, b, c], fallback=True)) == [
        (a, b, c), (a, b), (a, c), (b, c), (a,), (b,), (c,), ()
    ]  # fmt: skip
    assert list(d.attempts([a, b], fallback=False)) == [(a, b), (a,), (b,)]
