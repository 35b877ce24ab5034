"""The bytes of secure aggregation are those of real messages."""

from __future__ import annotations

import pytest

from archipel.protocol.messages import ConfirmRequest
from archipel.protocol.sealed import encode
from archipel.simulation.system import traffic
from tests.support.rounds import Round


@pytest.mark.parametrize(("count", "seats", "gone"), [(3, 3, 0), (5, 8, 1), (7, 7, 2)])
def test_every_phase_has_the_size_of_real_messages(count: int, seats: int, gone: int) -> None:
    round_ = Round(count, max_cohort=seats, threshold=count // 2 + 1, length=50)
    round_.advertise()
    assert traffic.advertising(seats).up == len(encode(round_.requests[0]))
    cohort = round_.cohort_for(0)
    round_.share()
    expected = traffic.Traffic(len(encode(cohort)), len(encode(round_.sent[0])))
    assert traffic.sharing(count, seats, "pupils") == expected
    stay = list(range(count - gone))
    complaints = round_.complain()
    expected = traffic.Traffic(len(encode(round_.inbox(0))), len(encode(complaints)))
    assert traffic.complaining(count) == expected
    round_.mask(stay)
    survivors = round_.survivors
    confirmations = round_.confirm(stay)
    request = ConfirmRequest(confirmation=confirmations.confirmations[0].confirmation)
    assert traffic.confirming(len(stay)) == traffic.Traffic(len(encode(survivors)), len(encode(request)))
    unmasking = round_.unmask(confirmations, stay)[round_.ids[0]]
    expected = traffic.Traffic(len(encode(confirmations)), len(encode(unmasking)))
    assert traffic.unmasking(len(stay), len(stay), gone) == expected
