"""Dropout's masks against a second implementation of the hash in NumPy, and against what randomness looks like."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from archipel import Model, training
from archipel.bundle.roles import role_of
from archipel.errors import TrainingError
from archipel.graph import check_model
from archipel.training import StepRunner, losses, optimizers

ROWS, WIDTH, RATIO = 96, 64, 0.3


def mix(x: np.ndarray, key: int = 0) -> np.ndarray:
    """lowbias32 as its author gives it, in C's arithmetic, with a key before the second product."""
    x = np.asarray(x, np.uint64)
    x ^= x >> np.uint64(16)
    x = x * np.uint64(0x7FEB352D) % np.uint64(1 << 32)
    x = (x ^ (x >> np.uint64(15))) ^ np.uint64(key)
    x = x * np.uint64(0x846CA68B) % np.uint64(1 << 32)
    return x ^ (x >> np.uint64(16))


def model(text: str, weights: np.ndarray, inputs: str = "") -> Model:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[batch, {WIDTH}] x{inputs}) => (float[batch, {WIDTH}] y)
        <float[{", ".join(map(str, weights.shape))}] w, float r = {{{RATIO}}}> {{ {text} }}"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return Model.from_proto(proto)


def factors(program: Model, steps: int = 1, seed: int = 0, **more: np.ndarray) -> list[np.ndarray]:
    """What a model y = Dropout(x * w), with w of ones in the shape of x, multiplies each element with, step by step.

    With the loss mean |y - 0| and a rate of 1 that is how far each element of w moves, times the number of them.
    """
    runner = StepRunner(program, {"lr": 1.0}, seed)
    found = []
    for step in range(steps):
        runner.resume({**runner.tensors, "w": np.ones((ROWS, WIDTH), np.float32)}, step)
        runner.step({"x": np.ones((ROWS, WIDTH), np.float32), "label": np.zeros((ROWS, WIDTH), np.float32), **more})
        found.append((1 - runner.tensors["w"]) * ROWS * WIDTH)
    return found


ONES = np.ones((ROWS, WIDTH), np.float32)
ONCE = "a = Mul (x, w) y = Dropout (a, r)"
LOSS, SGD = losses.l1(), optimizers.sgd()


def test_masks_are_those_of_numpy_bit_for_bit() -> None:
    program = training.step_graph(model("a = Mul (x, w) b = Dropout (a, r) y = Dropout (b, r)", ONES), LOSS, SGD)
    check_model(program.ir)
    roles = {port.name: (role_of(port), port.dtype) for port in program.signature.inputs}
    assert roles["seed"] == ("seed", "uint32")
    assert roles["step"] == ("step", "int64")
    for seed in (0, 7, 2**32 - 1):
        for step, found in enumerate(factors(program, 3, seed)):
            first, second = (mask(seed, step, n, ROWS * WIDTH, RATIO).reshape(ROWS, WIDTH) for n in (0, 1))
            np.testing.assert_allclose(found, (first & second) / (1 - RATIO) ** 2, atol=1e-3)


def test_bits_look_random() -> None:
    """On the second implementation, which the test above ties to the first."""
    draws = np.stack([mask_bits(seed, step, n) for seed in (0, 1) for step in range(16) for n in (0, 1)])
    for shift in (0, 8, 16, 24):
        counts = np.bincount((draws >> np.uint64(shift)).ravel().astype(np.int64) & 255, minlength=256)
        expected = draws.size / 256
        chi2 = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi2 - 255) < 4.5 * np.sqrt(2 * 255)
    signs = np.where((draws >> np.uint64(31)) > 0, 1.0, -1.0)
    limit = 4.5 * np.sqrt(signs.shape[1])
    # Between streams (of other seeds, steps and nodes), and between each element and those 1, 2 and WIDTH after it.
    between = signs @ signs.T
    assert np.abs(between[~np.eye(len(signs), dtype=bool)]).max() < limit
    for lag in (1, 2, WIDTH):
        assert np.abs((signs[:, lag:] * signs[:, :-lag]).sum(axis=1)).max() < limit


def mask_bits(seed: int, step: int, number: int, size: int = 1 << 15) -> np.ndarray:
    base = mix(mix(np.array(seed)) ^ np.uint64(step))
    a, b = (int(mix(base ^ np.uint64(2 * number + i))) for i in (0, 1))
    return mix(np.arange(size, dtype=np.uint64) ^ np.uint64(a), b)


def mask(seed: int, step: int, number: int, size: int, ratio: float) -> np.ndarray:
    upper = (mask_bits(seed, step, number, size) >> np.uint64(8)).astype(np.float32)
    return upper >= np.float32(ratio) * np.float32(2**24)


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("a = Mul (x, w) y = Dropout (a)", 0.5),
        ("a = Mul (x, w) y = Dropout <seed = 3> (a, r)", RATIO),
        ("a = Mul (x, w) t = Constant <value = bool {1}> () y = Dropout (a, r, t)", RATIO),
        ("a = Mul (x, w) q = Constant <value = float {0.9}> () y = Dropout (a, q)", 0.9),
        ("a = Mul (x, w) q = Constant <value = float {1.0}> () y = Dropout (a, q)", 1.0),
        ("a = Mul (x, w) q = Constant <value = float {0.0}> () y = Dropout (a, q)", 0.0),
        ("a = Mul (x, w) s = ReduceMean <keepdims = 0> (x) h = Mul (s, r) y = Dropout (a, h)", RATIO),
        ("a = Mul (x, w) b, k = Dropout (a, r) c = Cast <to = 1> (k) y = Mul (b, c)", RATIO),
    ],
)  # fmt: skip
def test_ratio(text: str, ratio: float) -> None:
    found = factors(training.step_graph(model(text, ONES), LOSS, SGD))[0]
    kept = found != 0
    assert abs(kept.mean() - (1 - ratio)) <= 4 * np.sqrt(ratio * (1 - ratio) / kept.size)
    np.testing.assert_allclose(found[kept], 1 / (1 - ratio) if ratio < 1 else 0, rtol=1e-3)


def test_several_steps_draw_their_own_masks() -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((5, WIDTH), np.float32), np.zeros((5, WIDTH), np.float32)) for _ in range(4)]
    one, four = (training.step_graph(model(ONCE, ONES[:1]), LOSS, SGD, steps=steps) for steps in (1, 4))
    check_model(four.ir)
    expected = training.run_steps(one, batches, seed=5)
    assert training.run_steps(four, batches, seed=5) == pytest.approx(expected, rel=1e-6)
    assert training.run_steps(four, batches, seed=6) != pytest.approx(expected, rel=1e-3)
    first, second = factors(training.step_graph(model(ONCE, ONES), LOSS, SGD), 2)
    assert 0.3 < ((first != 0) == (second != 0)).mean() < 0.7


@pytest.mark.parametrize("text", [ONCE, "a = Mul (x, w) t = Constant <value = bool {1}> () y = Dropout (a, r, t)"])
def test_without_dropout_and_in_evaluation_nothing_is_dropped(text: str) -> None:
    program = training.step_graph(model(text, ONES), LOSS, SGD, dropout=False)
    assert not {"seed", "step"} & {port.name for port in program.signature.inputs}
    np.testing.assert_allclose(factors(program)[0], 1, rtol=1e-3)
    evaluation = training.evaluate_graph(model(text, ONES), LOSS)
    assert not any(node.op_type == "Dropout" for node in evaluation.ir.graph)


def test_dropout_in_a_branch_is_refused() -> None:
    text = """a = Mul (x, w) q = Constant <value = bool {1}> ()
    y = If (q) <then_branch = t () => (float[batch, 64] u) { u = Dropout (a, r) },
                else_branch = e () => (float[batch, 64] v) { v = Identity (a) }>"""
    with pytest.raises(TrainingError, match="inside a loop or branch"):
        training.step_graph(model(text, ONES), LOSS, SGD)
