"""What one update may be before it leaves the device, and what the sum of many can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from archipel.bundle import write_weights
from archipel.bundle.roles import Program, Update
from archipel.errors import BoundError, MessageError
from archipel.protocol import Layout
from archipel.protocol.bounds import check_sum, groups, mean_bound, weight_sums
from archipel.protocol.plain import decode_plain, encode_plain

F32: dict[str, Any] = {"dtype": "float32"}
DELTAS: dict[str, Any] = {"kind": "delta", "weighting": "examples", "range": 1.0, "bits": 16, "clip": 0.5, **F32}
PORTS = (
    Update(name="dw", tensor="w", shape=(2,), **DELTAS),
    Update(name="db", tensor="b", shape=(), **DELTAS),
    Update(name="steps", tensor="steps", shape=(), kind="value", weighting="examples", range=8.0, bits=16, **F32),
    Update(
        name="c", tensor="c", shape=(2,), kind="value", weighting="uniform", range=4.0, bits=16, clip=2.0, **F32
    ),
    Update(
        name="n", tensor="n", shape=(), kind="weight", weighting="examples", range=1.0, bits=16, lowest=0.01, **F32
    ),
)  # fmt: skip
LAYOUT = Layout.of(Program(kind="finish", inputs=(), outputs=PORTS))
# 0.3, 0.4 and 0 have a norm of 0.5, the clip, times a weight of 0.5.
GOOD = {"dw": [0.15, 0.2], "db": 0.0, "steps": 4.0, "c": [0.0, 2.0], "n": 0.5}


def arrays(**changes: npt.ArrayLike) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.float32) for name, value in {**GOOD, **changes}.items()}


BEYOND = [
    ({"dw": [0.3, 0.4]}, "the norm of its deltas is 0.5, at most 0.25"),
    ({"db": 0.1}, "the norm of its deltas"),
    # A weight that is next to nothing must not let the deltas through: the server divides by it.
    ({"n": 0.02}, "the norm of its deltas is 0.25, at most 0.01"),
    ({"n": 0.001}, "the weight is 0.001, expected at least 0.01"),
    ({"n": 0.0}, "expected at least 0.01"),
    ({"n": -0.5}, "expected at least 0.01"),
    ({"n": 1.1}, "up to 1"),
    ({"c": [1.5, 1.5]}, "the norm of its values is 2.12132, at most 2"),
]


def encode(values: dict[str, np.ndarray]) -> np.ndarray:
    return LAYOUT.encode(values, modulus_bits=24, max_cohort=4)


def test_an_update_at_every_bound_is_encoded() -> None:
    total = LAYOUT.decode_sum(encode(arrays()), cohort=1, modulus_bits=24)
    assert total.weight == pytest.approx(0.5, abs=1e-4)
    np.testing.assert_allclose(total.deltas["w"], [0.15, 0.2], atol=1e-4)
    LAYOUT.check_sum(total, 1)
    assert decode_plain(encode_plain(LAYOUT, arrays()), LAYOUT).keys() == GOOD.keys()


@pytest.mark.parametrize(("change", "words"), BEYOND)
def test_the_device_refuses_an_update_beyond_what_its_manifest_states(
    change: dict[str, npt.ArrayLike], words: str
) -> None:
    for send in (encode, lambda values: encode_plain(LAYOUT, values)):
        with pytest.raises(BoundError, match=words):
            send(arrays(**change))


def told(words: str) -> str:
    """How the server says it: a weight beyond its range is found as an entry before it is found as a weight."""
    return words.split(" is ")[0] if "norm" in words else "the weight is|not a number up to 1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((change, told(words)) for change, words in BEYOND),
        ({"steps": 4.1}, "an entry of"),  # 8 steps at most, of a device that weighs 0.5
        ({"steps": 9.0}, "an entry of"),
    ],
)
def test_the_server_refuses_a_plain_update_beyond_it(change: dict[str, npt.ArrayLike], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        decode_plain(write_weights(arrays(**change)), LAYOUT)


def test_a_value_is_clamped_to_its_range_times_the_weight() -> None:
    for steps in (4.5, 100.0):
        total = LAYOUT.decode_sum(encode(arrays(steps=steps)), cohort=1, modulus_bits=24)
        assert float(total.values["steps"]) == pytest.approx(4.0, abs=8 / 2**15)
        assert decode_plain(encode_plain(LAYOUT, arrays(steps=steps)), LAYOUT)["steps"] == 4.0


def test_the_bounds_of_a_sum_by_hand() -> None:
    """Ten devices: weights from 10 x 327 to 10 x 32767 steps of 1 / 32767, since 0.01 is 327.67 of them."""
    assert weight_sums(PORTS, 10) == pytest.approx((10 * 327 / 32767, 10.0))
    deltas, steps, controls = groups(PORTS)
    assert [group.name for group in (deltas, steps, controls)] == ["deltas", "'steps'", "values"]
    assert deltas.rounding(10) == pytest.approx(10 * np.sqrt(3) / 65534)
    assert steps.rounding(10) == pytest.approx(10 * 8 / 65534)
    # (0.5 x (0.0998 + 10 / 65534) + 10 sqrt(3) / 65534) / 0.0998, and a thousandth of clip for float32.
    least = 10 * 327 / 32767
    expected = (0.5 * (least + 10 / 65534) * 1.001 + 10 * np.sqrt(3) / 65534) / least
    assert mean_bound(PORTS, deltas, 10) == pytest.approx(expected)
    assert mean_bound(controls.ports, controls, 10) == pytest.approx(2.0 * 1.001 + np.sqrt(2) * 4 / 65534)


def test_noise_that_the_manifest_states_is_let_through() -> None:
    """A norm of n normal numbers is sqrt(n) on average; 12 deviations more never happen."""
    quiet = Update(name="dw", tensor="w", shape=(400,), **{**DELTAS, "weighting": "uniform"})
    noisy = Update(name="dw", tensor="w", shape=(400,), noise=0.1, **{**DELTAS, "weighting": "uniform"})
    generator = np.random.default_rng(0)
    for _ in range(50):
        noise = generator.normal(0, 0.1 * np.sqrt(10), 400)
        check_sum((noisy,), {"dw": noise}, 10)
    with pytest.raises(BoundError, match="noise 0"):
        check_sum((quiet,), {"dw": noise}, 10)
    with pytest.raises(BoundError, match="the norm of the deltas"):
        check_sum((noisy,), {"dw": 3 * noise}, 10)
