"""How much noise a target epsilon needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from archipel.errors import PolicyError
from archipel.privacy.accounting import AccountantName, as_dp_event, check_delta, import_library, new_accountant
from archipel.privacy.accounting import spent_epsilon as _spent
from archipel.privacy.events import Event, Gaussian, Poisson, Repeated

_MOST = 1e9


def least_multiplier(
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    probability: float = 1.0,
    before: Sequence[Event] = (),
    accountant: AccountantName = "rdp",
) -> float:
    """The least noise multiplier, up to 1e-6, with which `rounds` noisy sums cost at most `epsilon`.

    Arguments:
        epsilon: the target, above 0.
        delta: as of `spent_epsilon`.
        rounds: how many sums, 1 or more.
        probability: with which each unit is in each sum by Poisson sampling; 1: no sampling.
        before: events that the account has already, which the target includes.
        accountant: as of `spent_epsilon`.

    Raises PolicyError for numbers out of bounds, and where the account has no room for any of the rounds.

    Example:
        multiplier = least_multiplier(8.0, delta=1e-6, rounds=100)
    """
    if not 0 < epsilon < math.inf or rounds < 1:
        raise PolicyError(f"epsilon, rounds: expected numbers above 0, got {epsilon} and {rounds}")
    check_delta(delta)
    library = import_library()
    spent = _spent(before, delta, accountant)
    if spent >= epsilon:
        raise PolicyError(f"epsilon: {spent:.4g} of {epsilon:g} is spent already, at delta {delta:g}")

    def event(multiplier: float) -> object:
        one: Gaussian | Poisson = Gaussian(noise_multiplier=max(multiplier, 1e-9))
        if probability < 1:
            one = Poisson(probability=probability, event=Gaussian(noise_multiplier=max(multiplier, 1e-9)))
        together = [*before, Repeated(event=one, count=rounds)]
        return library.ComposedDpEvent([as_dp_event(each) for each in together])

    try:
        found = library.calibrate_dp_mechanism(lambda: new_accountant(accountant), event, epsilon, delta)
    except (library.mechanism_calibration.NoBracketIntervalFoundError, ValueError):
        found = math.inf
    if not 0 < found < _MOST:
        raise PolicyError(
            f"epsilon: no noise makes {rounds} rounds cost at most {epsilon:g} at delta {delta:g}; raise epsilon, or "
            "take fewer rounds"
        )
    return float(found)
