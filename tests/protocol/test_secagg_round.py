"""Whole rounds: the sum is exact or there is none, whoever drops out and when."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from archipel.errors import SecureAggregationError, ThresholdError
from archipel.protocol import unmask_sum
from archipel.protocol.messages import Complaints, Shares

STEPS = ("advertise", "share", "mask", "confirm", "unmask")
"""The last step that a device takes part in."""


def run(round_, last: tuple[str, ...]) -> np.ndarray:
    def still(step: str) -> list[int]:
        return [i for i, exit_ in enumerate(last) if STEPS.index(exit_) >= STEPS.index(step)]

    round_.advertise()
    round_.share(still("share"))
    round_.mask(still("mask"))
    confirmations = round_.confirm(still("confirm"))
    return round_.sum(round_.unmask(confirmations, still("unmask")))


# At least three of four must stay to the end. The fourth may leave after any step: two orders each, and staying.
# With min_cohort 4 it must at least have sent its vector.
@pytest.mark.parametrize(("min_cohort", "successes"), [(2, 9), (4, 5)])
@pytest.mark.sampled(every=8)
def test_every_pattern_of_dropouts(make_round, min_cohort, successes):
    count, threshold = 4, 3
    succeeded = 0
    # In which place the devices stand matters only for the sign of a mask: two orders of every multiset.
    patterns = {p for c in itertools.combinations_with_replacement(STEPS, count) for p in (c, c[::-1])}
    for last in sorted(patterns):
        alive = {step: sum(STEPS.index(exit_) >= STEPS.index(step) for exit_ in last) for step in STEPS}
        enough = max(threshold, min_cohort)
        expected = alive["mask"] >= enough and alive["confirm"] >= threshold and alive["unmask"] >= threshold
        round_ = make_round(count, threshold=threshold, min_cohort=min_cohort, length=8)
        if expected:
            assert run(round_, last).tolist() == round_.plain_sum(), last
            succeeded += 1
        else:
            with pytest.raises(ThresholdError):
                run(round_, last)
    assert succeeded == successes


@pytest.mark.sampled(every=4)
def test_every_device_may_be_the_one_that_drops_out(make_round):
    for gone in range(5):
        for step in STEPS:
            round_ = make_round(5, threshold=3, length=8)
            last = tuple(step if i == gone else "unmask" for i in range(5))
            assert run(round_, last).tolist() == round_.plain_sum()


@pytest.mark.parametrize("bits", [8, 9, 16, 24, 31, 32])
def test_every_modulus(make_round, bits):
    round_ = make_round(3, threshold=2, modulus_bits=bits, length=100)
    result = run(round_, ("unmask", "unmask", "share"))
    assert result.dtype == np.uint32
    assert result.tolist() == round_.plain_sum()
    assert max(int(masked.max()) for masked in round_.masked.values()) < 2**bits


@pytest.mark.parametrize("length", [0, 1, 32_767, 32_768, 32_769, 70_000])
def test_every_length(make_round, length):
    round_ = make_round(3, threshold=2, length=length)
    assert run(round_, ("unmask", "unmask", "unmask")).tolist() == round_.plain_sum()


@pytest.mark.sampled(every=4)
def test_many_devices_two_vanish_after_sharing_keys(make_round):
    round_ = make_round(24, threshold=13, min_cohort=16, length=1_000)
    last = tuple("share" if i in (3, 17) else "unmask" for i in range(24))
    assert run(round_, last).tolist() == round_.plain_sum()


def test_some_never_advertise(make_round):
    round_ = make_round(6, threshold=4)
    round_.advertise([5, 0, 3, 2, 1])
    for act in (round_.share, round_.mask):
        act([0, 1, 2, 3, 5])
    answers = round_.unmask(round_.confirm([0, 1, 2, 3, 5]), [0, 1, 3, 5])
    assert round_.sum(answers).tolist() == round_.plain_sum()


def test_the_input_vector_and_the_total_stay_as_they_are(make_round):
    round_ = make_round(3, threshold=2)
    vector = round_.vectors[0].copy()
    round_.advertise()
    round_.share()
    round_.mask()
    np.testing.assert_array_equal(round_.vectors[0], vector)
    answers = round_.unmask(round_.confirm())
    total = round_.total
    before = total.copy()
    unmask_sum(total, plan=round_.plan, cohort=round_.cohort, sharers=round_.ids, survivors=round_.ids, answers=answers)
    np.testing.assert_array_equal(total, before)


def chi_square_of_bytes(vector: np.ndarray, width: int) -> float:
    data = vector.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].reshape(-1)
    counts = np.bincount(data, minlength=256)
    expected = data.size / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_masked_vector_looks_uniform(make_round):
    # 255 degrees of freedom: mean 255, standard deviation 22.6. The seeds are fixed, so this cannot flicker.
    round_ = make_round(3, threshold=2, length=100_000)
    for i in range(3):
        round_.vectors[i] = np.full(100_000, 7, np.uint32)
    round_.advertise()
    round_.share()
    round_.mask()
    for masked in round_.masked.values():
        assert 255 - 5 * 22.6 < chi_square_of_bytes(masked, 3) < 255 + 5 * 22.6
    first, second = round_.masked[0], round_.masked[1]
    assert 255 - 5 * 22.6 < chi_square_of_bytes((first - second) & np.uint32(0xFFFFFF), 3) < 255 + 5 * 22.6
    assert chi_square_of_bytes(round_.vectors[0], 3) > 1e6


def test_part_of_the_survivors_cannot_be_summed(make_round):
    round_ = make_round(4, threshold=3, length=50_000)
    for i in range(4):
        round_.vectors[i] = np.zeros(50_000, np.uint32)
    round_.advertise()
    round_.share()
    round_.mask()
    answers = round_.unmask(round_.confirm())
    assert not round_.sum(answers).any()
    # The seeds of all are known now. Whoever leaves a vector out of the sum still meets the pairwise masks with it.
    del round_.masked[3]
    shorter = {
        device: type(answer)(
            self_seeds=[s for s in answer.self_seeds if s.device != round_.ids[3]],
            mask_keys=answer.mask_keys,
        )
        for device, answer in answers.items()
        if device != round_.ids[3]
    }
    sharers = [round_.ids[i] for i in range(3)]
    wrong = unmask_sum(
        round_.total,
        plan=round_.plan,
        cohort=round_.cohort,
        sharers=sharers,
        survivors=sorted(sharers),
        answers=shorter,
    )
    assert 255 - 5 * 22.6 < chi_square_of_bytes(wrong, 3) < 255 + 5 * 22.6


def test_two_rounds_of_the_same_devices_share_no_mask(make_round):
    zeros = []
    for name in ("first", "second"):
        round_ = make_round(3, threshold=2, name=name, round_id=("a" if name == "first" else "b") * 32)
        for i in range(3):
            round_.vectors[i] = np.zeros(2_000, np.uint32)
        round_.advertise()
        round_.share()
        round_.mask()
        zeros.append(round_.masked[0])
    assert np.mean(zeros[0] == zeros[1]) < 0.01


def test_steps_out_of_order_change_nothing(make_round):
    round_ = make_round(3, threshold=2)
    device = round_.devices[0]
    round_.advertise()
    for early in (
        device.advertise,
        lambda: device.complain(Shares(shares=[])),
        lambda: device.mask(round_.vectors[0], Complaints(complaints=[])),
        lambda: device.confirm(round_.survivors),
    ):
        with pytest.raises(SecureAggregationError, match="expected 'share'"):
            early()
    round_.share()
    with pytest.raises(SecureAggregationError, match="expected 'complain'"):
        device.share(round_.cohort)
    round_.mask()
    confirmations = round_.confirm()
    answers = round_.unmask(confirmations)
    with pytest.raises(SecureAggregationError, match="expected 'done'"):
        device.unmask(confirmations)
    assert round_.sum(answers).tolist() == round_.plain_sum()
