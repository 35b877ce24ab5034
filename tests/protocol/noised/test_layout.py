"""Vectors with devices' own noise, and their sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from archipel.bundle.roles import Update
from archipel.errors import BoundError, PolicyError, ProtocolError
from archipel.protocol.messages import NoiseShare
from archipel.protocol.metrics.training_metrics import count_entry
from archipel.protocol.noised.layout import NoisedLayout, padded_length
from archipel.protocol.noised.shares import choose_share, squared_norm
from archipel.protocol.plain import decode_plain, encode_plain
from archipel.protocol.vector import Layout, Vector

CLIP = 2.0


def delta(name: str, *shape: int, **changes: object) -> Update:
    values = {
        "name": name, "tensor": name, "dtype": "float32", "shape": shape, "kind": "delta", "weighting": "uniform",
        "range": CLIP, "bits": 16, "clip": CLIP, **changes,
    }  # fmt: skip
    return Update(**values)  # type: ignore[arg-type]


def layout_of(
    size: int, share: NoiseShare, seed: int = 5, randomness: Callable[[int], bytes] | None = None
) -> NoisedLayout:
    plain = Layout((delta("w", size // 2, 2), delta("b", size % 2 + 1), count_entry("archipel/devices/update/clipped")))
    made = NoisedLayout.over(plain, share, seed)
    return made if randomness is None else NoisedLayout(made.updates, noise=share, seed=seed, randomness=randomness)


def changes(size: int, norm: float, seed: int = 3) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(seed).normal(size=2 * (size // 2) + size % 2 + 1)
    drawn *= norm / np.linalg.norm(drawn)
    return {
        "w": drawn[: 2 * (size // 2)].reshape(-1, 2).astype(np.float32),
        "b": drawn[2 * (size // 2) :].astype(np.float32),
        "archipel/devices/update/clipped": np.array(1.0, np.float32),
    }


def add(vectors: list[Vector], bits: int) -> Vector:
    return (np.sum(vectors, axis=0, dtype=np.uint64) % 2**bits).astype(np.uint32)


def signed(vector: Vector, bits: int) -> np.ndarray:
    return (vector.astype(np.int64) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


@pytest.mark.sampled(every=3)
def test_the_sum_is_that_of_the_changes_with_the_noise_of_all_devices() -> None:
    """20,000 changes of 8 devices, whose noise has a variance within five standard errors of what it should have."""
    size, share = 20_000, NoiseShare(deviation=37, steps=568)
    layout = layout_of(size, share)
    bits = layout.modulus_bits(8)
    given = [changes(size, 1.5, seed) for seed in range(8)]
    total = add([layout.encode(each, modulus_bits=bits, max_cohort=8) for each in given], bits)
    whole = layout.signed_sum(total, cohort=8, modulus_bits=bits)
    found = layout.decode_sum(total, cohort=8, modulus_bits=bits)
    assert (found.values, found.weight, set(found.deltas)) == ({}, None, {"w", "b"})
    exact = np.concatenate([np.sum([each[name] for each in given], axis=0).ravel() for name in ("w", "b")])
    noisy = np.concatenate([found.deltas[name].ravel() for name in ("w", "b")])
    # The noise makes it far longer than eight updates can be, to which it is shortened.
    longest = 8 * (CLIP * 1.001 + math.sqrt(noisy.size) * CLIP / 32767 / 2)
    assert np.linalg.norm(noisy) == pytest.approx(longest, rel=1e-6)
    step = CLIP / share.steps
    scale = np.linalg.norm(whole) * step / np.linalg.norm(noisy)
    steps = (noisy * scale - exact) / step
    # Rounding by chance adds between nothing and a quarter of each device.
    low, high = (8 * (37**2 + rounding) for rounding in (0.0, 0.25))
    variance, spread = steps.var(), 5 * math.sqrt(2 / size)
    assert low * (1 - spread) < variance < high * (1 + spread)
    assert abs(steps.mean()) < 5 * math.sqrt(high / size)
    # And it is normal, as far as this many samples tell.
    assert stats.kstest(steps / math.sqrt(variance), "norm").pvalue > 1e-6


@pytest.mark.sampled(every=8)
def test_without_noise_rounding_is_right_on_average() -> None:
    """The least noise of a step, and many devices with one update: what the paper's randomised rounding is for."""
    share, vectors = NoiseShare(deviation=1, steps=256), []
    layout = layout_of(7, share)
    bits = layout.modulus_bits(1000)
    given = changes(7, 1.0)
    vectors = [layout.encode(given, modulus_bits=bits, max_cohort=1000) for _ in range(1000)]
    mean = layout.decode_sum(add(vectors, bits), cohort=1000, modulus_bits=bits)
    for name in ("w", "b"):
        # A deviation of 1 step of noise and at most half a step of rounding; the clip is 256 steps.
        bound = 6 * math.sqrt(1.25 / 1000) * CLIP / 256
        np.testing.assert_allclose(mean.deltas[name] / 1000, given[name], atol=bound)


@pytest.mark.parametrize("size", [2, 7, 300, 5000])
def test_what_one_device_adds_is_never_longer_than_the_noise_is_made_for(size: int) -> None:
    """In whole numbers, before the noise, of an update as long as the clip."""
    share = choose_share(1.0, padded_length(size + 1), 3)
    layout, longest = layout_of(size, share), squared_norm(share.steps, padded_length(size + 1))
    for seed in range(40):
        rotated = layout._rotated(layout.check(changes(size, CLIP * 1.0009, seed)))
        rounded = layout._round(rotated)
        assert (rounded**2).sum() <= longest
        assert np.abs(rounded - rotated).max() < 1
        assert np.linalg.norm(rotated) <= share.steps * (1 + 1e-6)


def test_a_rounding_that_is_too_long_is_drawn_again() -> None:
    """One that rounds all elements up first is thrown away."""
    asked = []

    def randomness(count: int) -> bytes:
        asked.append(count)
        return bytes(count) if len(asked) < 4 else np.random.default_rng(len(asked)).bytes(count)

    size = 1023
    share = NoiseShare(deviation=4, steps=8)
    layout = layout_of(size, share, randomness=randomness)
    rounded = layout._round(layout._rotated(layout.check(changes(size, CLIP))))
    assert len(asked) >= 4
    assert (rounded**2).sum() <= squared_norm(8, layout.length)
    short = NoisedLayout(layout.updates, noise=share, randomness=bytes)
    with pytest.raises(ProtocolError, match="too long 256 times"):
        short._round(np.full(layout.length, 0.5))


def test_the_order_is_clip_rotate_round_noise_modulo() -> None:
    """By hand, from the bytes that the layout draws."""
    drawn: list[bytes] = []

    def randomness(count: int) -> bytes:
        drawn.append(np.random.default_rng(len(drawn)).bytes(count))
        return drawn[-1]

    share = NoiseShare(deviation=50, steps=1000)
    layout = layout_of(3, share, seed=9, randomness=randomness)
    given = changes(3, CLIP / 2)
    vector = layout.encode(given, modulus_bits=16, max_cohort=4)
    hadamard = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    from archipel.protocol.noised.rotation import draw_signs

    flat = np.concatenate([given["w"].ravel(), given["b"]]).astype(np.float64)
    steps = hadamard @ (flat * draw_signs(9, 4)) * 1000 / CLIP
    uniform = (np.frombuffer(drawn[0], "<u8") >> np.uint64(11)) / 2**53
    rounded = np.floor(steps) + (uniform < steps - np.floor(steps))
    noise = signed(vector, 16) - rounded
    assert np.abs(noise).max() < 12 * 50
    assert len(set(noise)) > 1


def test_moduli_have_room_and_sums_beyond_what_devices_can_send_are_refused() -> None:
    share = NoiseShare(deviation=300, steps=1000)
    layout = layout_of(1000, share)
    bits = layout.modulus_bits(10)
    # The changes spread over a block of 1024: 10 * 1000 * 12 / 32, and 12 deviations of the noise of ten devices.
    most = math.ceil(10 * 1000 * 12 / 32) + 10 + math.ceil(12 * 300 * math.sqrt(10))
    assert (bits, math.ceil(math.log2(most) + 1)) == (16, 15)
    assert layout.fits(15, 10)
    assert not layout.fits(14, 10)
    assert layout.widths(10) == [(1024, 15)]
    total = np.zeros(layout.length, np.uint32)
    total[7] = most + 1
    with pytest.raises(ProtocolError, match=f"beyond ±{most}"):
        layout.decode_sum(total, cohort=10, modulus_bits=bits)
    total[7] = 2**bits - most
    assert np.abs(layout.signed_sum(total, cohort=10, modulus_bits=bits)).max() == most
    # Each entry within its bound, and all together too long: noise of about the root of the length times its deviation.
    longest = 10 * math.sqrt(squared_norm(1000, 1024)) + 300 * math.sqrt(10) * (32 + 12)
    total[:] = math.ceil(longest / 32) + 1
    with pytest.raises(ProtocolError, match="its norm is"):
        layout.decode_sum(total, cohort=10, modulus_bits=bits)
    total[:] = math.floor(longest / 32) - 1
    layout.decode_sum(total, cohort=10, modulus_bits=bits)


def test_an_update_that_breaks_its_manifest_is_refused() -> None:
    layout = layout_of(5, NoiseShare(deviation=4, steps=256))
    with pytest.raises(BoundError, match="the norm of its deltas"):
        layout.encode(changes(5, 1.01 * CLIP), modulus_bits=16, max_cohort=4)
    with pytest.raises(ProtocolError, match="NaN"):
        layout.encode({**changes(5, 1.0), "b": np.array([np.nan, 0.0], np.float32)}, modulus_bits=16, max_cohort=4)
    with pytest.raises(ProtocolError, match="missing"):
        layout.encode({"w": changes(5, 1.0)["w"]}, modulus_bits=16, max_cohort=4)


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (delta("v", 2, weighting="examples"), "weights of their own"),
        (delta("v", 2, kind="value"), "beside their clipped changes"),
        (delta("v", 2, clip=1.0), "2 groups"),
        (delta("v", 2, noise=0.5), "add noise to their updates already"),
    ],
)
def test_noise_covers_clipped_changes_alone(port: Update, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        NoisedLayout.over(Layout((delta("w", 3), port)), NoiseShare(deviation=4, steps=256), 0)


def test_a_plain_update_has_all_the_noise_and_is_as_long_as_the_clip_at_most() -> None:
    """It passes the server's checks of plain updates, whose bounds know of no noise."""
    layout = layout_of(20_000, NoiseShare(deviation=20, steps=568))
    given = changes(20_000, CLIP)
    update = decode_plain(encode_plain(layout, given), layout)
    assert set(update) == {"w", "b"}
    found, exact = (np.concatenate([each[name].ravel() for name in ("w", "b")]) for each in (update, given))
    assert np.linalg.norm(found) == pytest.approx(CLIP, rel=1e-5)
    # Noise of 20 steps in each of 20,001 elements, of a clip of 568 steps: the update points a little the right way.
    cosine = found @ exact / CLIP**2
    assert cosine == pytest.approx(568 / math.hypot(568, 20 * math.sqrt(20_001)), abs=5 / math.sqrt(20_001))
    assert not np.array_equal(found, decode_plain(encode_plain(layout, given), layout)["w"].ravel())
    # With little noise it is the update.
    near = layout_of(20_000, NoiseShare(deviation=1, steps=1 << 20))
    close = decode_plain(encode_plain(near, changes(20_000, CLIP / 2)), near)
    np.testing.assert_allclose(close["w"], changes(20_000, CLIP / 2)["w"], atol=8 * CLIP / (1 << 20))
