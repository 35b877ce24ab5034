"""The server's half: what it refuses, and whom it names."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from archipel.errors import ConsistencyError, ProtocolError, ShareError, ThresholdError
from archipel.protocol import unmask_sum
from archipel.protocol.messages import RevealedShare
from archipel.protocol.secagg import shamir


@pytest.fixture
def finished(make_round):
    """Seven devices, threshold 4, the last has dropped out; all survivors answered."""
    round_ = make_round(7, threshold=4)
    round_.advertise()
    round_.share()
    round_.mask(range(6))
    return round_, round_.unmask(round_.confirm(range(6)), range(6))


def with_wrong_share(answer, kind, index=0):
    shares = list(getattr(answer, kind))
    wrong = (int.from_bytes(shares[index].share, "big") + 1) % shamir.PRIME
    shares[index] = RevealedShare(device=shares[index].device, share=wrong.to_bytes(33, "big"))
    return msgspec.structs.replace(answer, **{kind: shares})


def test_any_threshold_of_answers_gives_the_sum(finished):
    round_, answers = finished
    for left_out in range(3):
        some = dict(list(answers.items())[left_out : left_out + 4])
        assert round_.sum(some).tolist() == round_.plain_sum()
    with pytest.raises(ThresholdError, match="3 devices revealed"):
        round_.sum(dict(list(answers.items())[:3]))


@pytest.mark.parametrize("kind", ["self_seeds", "mask_keys"])
def test_one_wrong_share_is_named_and_the_rest_suffice(finished, kind):
    round_, answers = finished
    liar = round_.ids[2]
    answers[liar] = with_wrong_share(answers[liar], kind)
    with pytest.raises(ShareError, match=liar) as caught:
        round_.sum(answers)
    assert caught.value.devices == (liar,)
    del answers[liar]
    assert round_.sum(answers).tolist() == round_.plain_sum()


@pytest.mark.parametrize("kind", ["self_seeds", "mask_keys"])
def test_two_wrong_shares_are_seen_but_nobody_is_blamed(finished, kind):
    round_, answers = finished
    for liar in (round_.ids[2], round_.ids[4]):
        answers[liar] = with_wrong_share(answers[liar], kind)
    with pytest.raises(ShareError, match="one polynomial") as caught:
        round_.sum(answers)
    assert caught.value.devices == ()


def test_without_surplus_a_wrong_share_of_a_mask_key_is_still_seen(finished):
    round_, answers = finished
    some = dict(list(answers.items())[:4])
    liar = next(iter(some))
    some[liar] = with_wrong_share(some[liar], "mask_keys")
    with pytest.raises(ShareError):
        round_.sum(some)


def test_a_device_that_dealt_shares_of_another_key(finished, fixed):
    round_, answers = finished
    count = iter(range(100))
    dealt = shamir.split(fixed("another key"), 4, 7, lambda n: fixed(f"deal {next(count)}", n))
    position = {device: index for index, device in enumerate(sorted(round_.ids))}
    for device, answer in answers.items():
        share = RevealedShare(device=round_.ids[6], share=dealt[position[device]])
        answers[device] = msgspec.structs.replace(answer, mask_keys=[share])
    with pytest.raises(ShareError, match="dealt wrong shares") as caught:
        round_.sum(answers)
    assert caught.value.devices == (round_.ids[6],)


def test_sets_must_nest(finished):
    round_, answers = finished
    good = {
        "plan": round_.plan,
        "cohort": round_.cohort,
        "sharers": round_.ids,
        "survivors": round_.survivors.devices,
        "answers": answers,
    }
    total = round_.total
    assert unmask_sum(total, **good).tolist() == round_.plain_sum()
    for name, value in (
        ("sharers", round_.ids[:5]),
        ("sharers", [*round_.ids, round_.ids[0]]),
        ("survivors", round_.ids[:5]),
        ("survivors", [*round_.survivors.devices, "0" * 32]),
        ("answers", {**answers, "0" * 32: answers[round_.ids[0]]}),
    ):
        with pytest.raises(ConsistencyError):
            unmask_sum(total, **{**good, name: value})
    shorter = {d: msgspec.structs.replace(a, self_seeds=a.self_seeds[1:]) for d, a in answers.items()}
    with pytest.raises(ShareError, match="missing"):
        unmask_sum(total, **{**good, "answers": shorter})


def test_fewer_survivors_than_the_plan_needs(make_round):
    round_ = make_round(5, threshold=3, min_cohort=4)
    round_.advertise()
    round_.share()
    round_.mask()
    answers = round_.unmask(round_.confirm())
    with pytest.raises(ThresholdError, match="needs 4"):
        unmask_sum(
            round_.total,
            plan=round_.plan,
            cohort=round_.cohort,
            sharers=round_.ids,
            survivors=round_.survivors.devices[:3],
            answers={device: answers[device] for device in round_.survivors.devices[:3]},
        )


def test_a_cohort_of_two_plans(finished, make_round):
    round_, answers = finished
    other = make_round(7, threshold=4, number=2)
    other.advertise()
    mixed = type(round_.cohort)(members=[*round_.cohort.members[:6], other.cohort.members[6]])
    with pytest.raises(ConsistencyError, match="one plan"):
        unmask_sum(
            round_.total, plan=round_.plan, cohort=mixed, sharers=round_.ids, survivors=round_.survivors.devices,
            answers=answers,
        )  # fmt: skip


def test_a_total_that_is_no_vector(finished):
    round_, answers = finished
    for total in (np.zeros(20, np.uint64), np.full(20, 2**24, np.uint32)):
        with pytest.raises(ProtocolError):
            unmask_sum(
                total, plan=round_.plan, cohort=round_.cohort, sharers=round_.ids,
                survivors=round_.survivors.devices, answers=answers,
            )  # fmt: skip
