"""An active server with a few colluding devices wants one device's vector.

It tells two halves of the cohort different survivors: one with the victim, one without. The colluders confirm both, so
each half sees `threshold` confirmations of its own set and reveals its shares for it. The server then has the sum with
the victim and the sum without, and takes one from the other. That needs 2 threshold - n colluders: one where 3 of 5
must agree, two where 11 of 20 must. What stops it is the policy's share of colluders: devices insist on a threshold
above half of the cohort and its colluders together.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from archipel.bundle.manifest import PrivacyPolicy
from archipel.errors import ConsistencyError, PolicyError, SecureAggregationError, ThresholdError
from archipel.protocol import Layout, check_plan, seal, unmask_sum
from archipel.protocol.messages import Confirmation, Confirmations, Confirmed, RevealedShare, Survivors, Unmasking
from archipel.protocol.secagg.checks import survivors_digest
from tests.support.rounds import Round

POLICY = PrivacyPolicy(modes=("secure",), min_cohort=2, threshold=0.51, max_clip=1.0, max_bits=16)
VICTIM = 0


def unmasked_victim(count: int, threshold: int, colluders: int, *, withstands: int = 0) -> tuple[list[int], list[int]]:
    """What the server computes and what the victim sent. The last devices collude. Raises what devices raise."""
    round_ = Round(count, threshold=threshold, colluders=withstands, min_cohort=2 + withstands, length=8)
    round_.advertise()
    round_.share()
    round_.mask()
    ids = round_.ids
    honest, evil = list(range(count - colluders)), list(range(count - colluders, count))
    halves = honest[: len(honest) // 2], honest[len(honest) // 2 :]
    told = Survivors(devices=sorted(ids)), Survivors(devices=sorted(set(ids) - {ids[VICTIM]}))
    signed: Confirmation | None = None
    confirmed: list[dict[str, Confirmed]] = [{}, {}]
    for side, (half, survivors) in enumerate(zip(halves, told)):
        for i in half:
            made = round_.devices[i].confirm(survivors)
            signed = msgspec.json.decode(made.body, type=Confirmation)
            confirmed[side][ids[i]] = Confirmed(device=ids[i], confirmation=made)
    for i in evil:  # they sign whatever the server likes, twice
        for side, survivors in enumerate(told):
            assert signed is not None
            lie = msgspec.structs.replace(signed, survivors=survivors_digest(survivors))
            confirmed[side][ids[i]] = Confirmed(device=ids[i], confirmation=seal("confirmation", lie, round_.keys[i]))
    sums = []
    for side, (half, survivors) in enumerate(zip(halves, told)):
        shown = Confirmations(confirmations=list(confirmed[side].values()))
        answers = {ids[i]: round_.devices[i].unmask(shown) for i in half}
        answers |= {ids[i]: leaked(round_, i, survivors) for i in evil}
        total = np.zeros_like(round_.vectors[0])
        for i in range(count):
            if ids[i] in survivors.devices:
                total += round_.masked[i]
        sums.append(
            unmask_sum(
                total & np.uint32(2**round_.plan.modulus_bits - 1), plan=round_.plan, cohort=round_.cohort,
                sharers=ids, survivors=survivors.devices, answers=answers,
            )
        )  # fmt: skip
    found = (sums[0] - sums[1]) & np.uint32(2**round_.plan.modulus_bits - 1)
    return found.tolist(), round_.vectors[VICTIM].tolist()


def leaked(round_: Round, colluder: int, survivors: Survivors) -> Unmasking:
    """A colluder gives the server every share that it holds, of either kind."""
    held = round_.devices[colluder]._held
    return Unmasking(
        self_seeds=[RevealedShare(device=device, share=held[device][1]) for device in survivors.devices],
        mask_keys=[
            RevealedShare(device=device, share=held[device][0]) for device in sorted(set(held) - set(survivors.devices))
        ],
    )


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("count", "threshold", "colluders"), [(5, 3, 1), (20, 11, 2)])
def test_where_nobody_is_thought_to_collude_the_vector_is_read(count: int, threshold: int, colluders: int) -> None:
    found, sent = unmasked_victim(count, threshold, colluders)
    assert found == sent


@pytest.mark.parametrize(("count", "threshold", "least"), [(5, 3, 4), (20, 11, 14)])
def test_by_default_devices_refuse_such_a_plan(count: int, threshold: int, least: int) -> None:
    assert POLICY.colluders == 1 / 3
    withstands = count // 3
    round_ = Round(count, threshold=threshold, colluders=withstands, min_cohort=2 + withstands)
    for agreed in (threshold, least - 1):
        plan = msgspec.structs.replace(round_.plan, threshold=agreed)
        with pytest.raises(PolicyError, match=f"not more than half of max_cohort {count} and {withstands} colluders"):
            check_plan(plan, POLICY, Layout(()))
    check_plan(msgspec.structs.replace(round_.plan, threshold=least), POLICY, Layout(()))
    with pytest.raises(PolicyError, match="the policy withstands"):
        check_plan(msgspec.structs.replace(round_.plan, threshold=least, colluders=0), POLICY, Layout(()))
    # And the state machine by itself, with the cohort that there really is.
    with pytest.raises(ThresholdError, match="could split the cohort"):
        unmasked_victim(count, threshold, 1, withstands=withstands)


def test_colluders_do_not_count_as_those_who_hide_a_device() -> None:
    """Of five devices in a sum one may collude: where three others hide each one, the sum needs four and more."""
    policy = msgspec.structs.replace(POLICY, min_cohort=4)
    plan = Round(5, threshold=4, colluders=1, min_cohort=4).plan
    with pytest.raises(PolicyError, match="min_cohort 4, less 1 that may collude, is below the policy's 4; at least 5"):
        check_plan(plan, policy, Layout(()))
    check_plan(msgspec.structs.replace(plan, min_cohort=5), policy, Layout(()))


def test_both_halves_confirmations_shown_to_both() -> None:
    """Without a colluder: that half of the cohort was told of another set is seen from its signatures."""
    round_ = Round(5, threshold=3, min_cohort=2)
    round_.advertise()
    round_.share()
    round_.mask()
    told = [Survivors(devices=sorted(round_.ids)), Survivors(devices=sorted(set(round_.ids) - {round_.ids[VICTIM]}))]
    halves = {0: told[0], 1: told[0], 2: told[1], 3: told[1], 4: told[1]}
    shown = Confirmations(
        confirmations=[
            Confirmed(device=round_.ids[i], confirmation=round_.devices[i].confirm(survivors))
            for i, survivors in halves.items()
            if i != VICTIM
        ]
    )
    for i in range(1, 5):
        with pytest.raises(ConsistencyError, match="different survivors"):
            round_.devices[i].unmask(shown)
        assert round_.devices[i]._held == {}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("count", "threshold", "colluders"), [(5, 4, 1), (20, 14, 6)])
def test_a_third_of_the_cohort_is_not_enough(count: int, threshold: int, colluders: int) -> None:
    with pytest.raises(ThresholdError, match="nothing is revealed"):
        unmasked_victim(count, threshold, colluders, withstands=count // 3)


@pytest.mark.sampled(every=4)
def test_one_more_than_stated_is_enough() -> None:
    """The bound is exact: at n = 20 and t = 14, 2t - n = 8 colluders are, and 7 are not."""
    with pytest.raises(SecureAggregationError):
        unmasked_victim(20, 14, 7, withstands=6)
    found, sent = unmasked_victim(20, 14, 8, withstands=6)
    assert found == sent
