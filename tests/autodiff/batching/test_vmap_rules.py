"""The contract of batching rules: lane i of a result is what the operator gives for lane i of its inputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from gradient_cases.case import Case, try_examples
from gradient_cases.reference import evaluator
from hypothesis import strategies as st

from archipel import Model
from archipel.autodiff import RULES, vmap
from archipel.autodiff.batching.table import BATCH_RULES, SIZES, UNEVEN
from archipel.graph import check_model
from tests.autodiff.batching.vmap_cases import CALLS, Call

OWN = sorted(key for key, rule in RULES.items() if rule.__module__.startswith("archipel.") and key[0] == "")

# Operators whose values are no real numbers (rounded to a grid), or float32 alone.
ROUNDED = {"Cast", "Celu", "DequantizeLinear", "DynamicQuantizeLinear", "LayerNormalization", "QuantizeLinear"}
# Inputs of the cases of Loop that do not decide when it stops.
LOOP_DATA = (2, 3, 4)
# Whole tuples of indices, and bounds of slices, whose numbers cannot change places.
TUPLES = {"GatherND", "ScatterND", "Slice"}


@pytest.mark.parametrize("examples", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", OWN, ids=lambda key: key[1])
@pytest.mark.sampled(every=6)
def test_vmap(key: tuple[str, str], examples: int, gradient_cases: dict) -> None:
    def check(data: st.DataObject) -> None:
        case = data.draw(gradient_cases[key])
        candidates = [
            i
            for i, value in enumerate(case.inputs)
            if value is not None and i not in case.constants and i not in SIZES.get(case.op_type, ())
        ]
        if case.op_type == "Loop" and case.of != (0,):  # lanes that stop at different times can stack nothing
            candidates = [i for i in candidates if i in LOOP_DATA]
        chosen = data.draw(st.sets(st.sampled_from(candidates), min_size=1))
        check_case(case, chosen, data.draw(st.sampled_from([None, 2])), data.draw(st.booleans()))

    try_examples(check, st.data(), examples)


def check_case(case: Case, chosen: set[int], size: int | None, on_device: bool) -> None:
    precise = np.float32 if case.single else np.float64
    inputs = case.arrays(precise)
    names = [case.names[i] for i in sorted(chosen)]
    feeds = [inputs | {n: lane(case, inputs[n], number) for n in names} for number in range(2)]
    model = case.model(precise)
    single = evaluator(model)
    expected = [single.run(case.targets, feed) for feed in feeds]

    mapped = vmap(Model.from_proto(model), over=names, size=size)
    check_model(mapped.ir)
    assert [port.name for port in mapped.inputs] == [port.name for port in Model.from_proto(model).inputs]
    assert [port.name for port in mapped.outputs] == case.targets
    together = inputs | {n: np.stack([feed[n] for feed in feeds]) for n in names}
    found = evaluator(mapped.to_bytes()).run(case.targets, together)
    compare(case, found, expected, 1e-5 if case.single or case.op_type in ROUNDED else 1e-9)
    # ONNX Runtime has no recurrent layers with the batch first, and crashes where Split leaves out an output.
    if on_device and not case.attributes.get("layout") and not (case.op_type == "Split" and case.unused):
        with_onnx_runtime(case, names, size, feeds)


def lane(case: Case, value: np.ndarray, number: int) -> np.ndarray:
    """Another content for every lane, as valid as the first: elements moved along an axis, floats scaled as well."""
    tuples = case.op_type in TUPLES and value.dtype.kind == "i"
    if value.ndim and not (tuples and value.ndim == 1):
        value = np.roll(value, number, axis=0)
    return np.asarray(value * (1 + number / 4), value.dtype) if value.dtype.kind == "f" else value


def compare(case: Case, found: list[np.ndarray], expected: list[list[np.ndarray]], tolerance: float) -> None:
    for index, result in enumerate(found):
        each = [np.asarray(values[index]) for values in expected]
        if result.ndim == each[0].ndim:  # it depends on no batched input, as a shape
            each, result = each[:1], result[None]
        assert len(result) == len(each)
        for ours, theirs in zip(result, each):
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            if theirs.dtype.kind in "fc":
                scale = max(float(np.max(np.abs(theirs), initial=0.0)), 1.0)
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)
            else:
                np.testing.assert_array_equal(ours, theirs)


def with_onnx_runtime(case: Case, names: list[str], size: int | None, feeds: list[dict]) -> None:
    model = case.model(np.float32)
    mapped = vmap(Model.from_proto(model), over=names, size=size)
    singles = [{n: v.astype(np.float32) if v.dtype == np.float64 else v for n, v in feed.items()} for feed in feeds]
    expected = [run(model, case.targets, feed) for feed in singles]
    together = singles[0] | {n: np.stack([feed[n] for feed in singles]) for n in names}
    compare(case, run(mapped.to_bytes(), case.targets, together), expected, 1e-4)


def run(model: onnx.ModelProto | bytes, names: list[str], feed: dict) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    data = model if isinstance(model, bytes) else model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    taken = {port.name for port in session.get_inputs()}
    found: list[np.ndarray] = session.run(names, {name: value for name, value in feed.items() if name in taken})
    return found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.op_type)
@pytest.mark.sampled(every=6)
def test_vmap_without_gradients(call: Call) -> None:
    """Comparisons, integers, booleans, indices, shapes: against ONNX Runtime on one lane after the other."""
    model = call.model()
    inputs = {f"x{i}": value for i, value in enumerate(call.inputs) if value is not None and i not in call.constants}
    outputs = [value.name for value in model.graph.output]
    for number, chosen in enumerate(call.chosen):
        names = [f"x{i}" for i in chosen]
        feeds = [
            inputs | {n: np.roll(inputs[n], i, 0) if inputs[n].ndim else inputs[n] for n in names} for i in range(3)
        ]
        mapped = vmap(Model.from_proto(model), over=names, size=3 if number % 2 else None)
        check_model(mapped.ir)
        together = run(mapped.to_bytes(), outputs, inputs | {n: np.stack([feed[n] for feed in feeds]) for n in names})
        for i, feed in enumerate(feeds):
            for ours, theirs in zip(together, run(model, outputs, feed)):
                lane = ours if ours.ndim == theirs.ndim else ours[i]
                assert lane.dtype == theirs.dtype
                np.testing.assert_allclose(lane, theirs, rtol=1e-5, atol=1e-6)


def test_which_operators_run_lane_by_lane() -> None:
    """Written by hand, also in docs/transformations.md: a name goes when its rule comes."""
    slow = (
        "AffineGrid CenterCropPad DFT DeformConv DynamicQuantizeLinear EyeLike MaxRoiPool MaxUnpool "
        "MeanVarianceNormalization Multinomial RegexFullMatch RoiAlign STFT StringConcat "
        "StringNormalizer TfIdfVectorizer"
    )
    # They read no tensor, or give none.
    never = (
        "ConcatFromSequence Constant ImageDecoder Optional OptionalGetElement OptionalHasElement RandomNormal "
        "RandomUniform SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength "
        "SequenceMap SplitToSequence"
    )
    names = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == "" and s.since_version <= 21}
    current = {name for name in names if not onnx.defs.get_schema(name, 21).deprecated}
    assert current - set(BATCH_RULES) - set(UNEVEN) == {*slow.split(), *never.split()}


def test_numbers_of_four_bits_along_a_free_axis() -> None:
    """ONNX Runtime does not tell the shape of numbers of four bits."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    agraph (float[1, n] x, float[1] scale) => (float[1, n] y) {
        q = QuantizeLinear <axis = 0, output_dtype = 22> (x, scale)
        y = DequantizeLinear <axis = 0> (q, scale) }""")
    mapped = vmap(Model.from_proto(model), over=["x", "scale"])
    x, scale = np.array([[[-5.3, 4.9]], [[1.0, 2.6]]], np.float32), np.array([[0.7], [0.5]], np.float32)
    (found,) = run(mapped.to_bytes(), ["y"], {"x": x, "scale": scale})
    step = scale[..., None]
    np.testing.assert_allclose(found, np.clip(np.rint(x / step), -8, 7) * step, rtol=1e-6)
