"""The norm of a plain update's deltas against clip times weight, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from archipel.bundle import write_weights
from archipel.bundle.roles import Program, Update
from archipel.errors import MessageError
from archipel.protocol.plain import decode_plain
from archipel.protocol.vector import Layout

F32 = {"dtype": "float32", "weighting": "examples", "bits": 16}
LAYOUT = Layout.of(
    Program(
        kind="finish",
        inputs=(),
        outputs=(
            Update(name="a", tensor="a", shape=(2,), kind="delta", range=100.0, clip=5.0, **F32),
            Update(name="b", tensor="b", shape=(), kind="delta", range=100.0, clip=5.0, **F32),
            Update(name="n", tensor="n", shape=(), kind="weight", range=100.0, **F32),
        ),
    )
)


def sent(a: tuple[float, float], b: float, weight: float) -> bytes:
    arrays = {"a": np.array(a), "b": np.array(b), "n": np.array(weight)}
    return write_weights({name: array.astype(np.float32) for name, array in arrays.items()})


@pytest.mark.parametrize("weight", [0.001, 0.5, 1.0, 20.0])
def test_all_deltas_together_have_at_most_clip_times_weight(weight: float) -> None:
    """(3, 0) and 4 have the norm 5, which is the clip; either alone has less."""
    within = {"a": (3 * weight, 0.0), "b": -4 * weight}
    assert decode_plain(sent(**within, weight=weight), LAYOUT)["b"] == np.float32(-4 * weight)
    with pytest.raises(MessageError, match="norm"):
        decode_plain(sent((3 * weight, 0.0), -4.01 * weight, weight), LAYOUT)


def test_a_tiny_weight_amplifies_nothing() -> None:
    """The server divides by the sum of weights: with the clip alone as bound, this would move a mean by 5000."""
    with pytest.raises(MessageError, match="norm"):
        decode_plain(sent((3.0, 0.0), 4.0, 0.001), LAYOUT)


def test_without_weight_nothing_may_be_sent() -> None:
    decode_plain(sent((0.0, 0.0), 0.0, 0.0), LAYOUT)
    for a, b, weight in (((1e-6, 0.0), 0.0, 0.0), ((0.0, 0.0), 1e-6, 0.0), ((1.0, 0.0), 0.0, -1.0)):
        with pytest.raises(MessageError):
            decode_plain(sent(a, b, weight), LAYOUT)


def test_a_weight_below_zero_without_any_delta() -> None:
    """Nothing but the weight itself can tell: there is no norm."""
    layout = Layout.of(
        Program(
            kind="finish",
            inputs=(),
            outputs=(
                Update(name="v", tensor="v", shape=(), kind="value", range=1.0, **{**F32, "weighting": "uniform"}),
                Update(name="n", tensor="n", shape=(), kind="weight", range=100.0, **F32),
            ),
        )
    )

    def both(weight: float) -> bytes:
        return write_weights({"v": np.array(0.5, np.float32), "n": np.array(weight, np.float32)})

    assert decode_plain(both(0.0), layout)["v"] == 0.5
    with pytest.raises(MessageError):
        decode_plain(both(-1.0), layout)
