"""From events to epsilon, by the accountants of Google's dp-accounting.

Two lists of units are neighbours if one has a unit more than the other, or counts it for nothing ("zero-out"): for
these events both cost the same.

"rdp" adds up Renyi differential privacy (Mironov 2017; for samples Mironov, Talwar and Zhang 2019) and converts the
sum by Canonne, Kamath and Steinke 2020. It holds for the discrete Gaussian noise that archipel draws, too, whose Renyi
divergences are at most those of continuous noise (the same paper, theorems 4 and 14).

"pld" adds up privacy loss distributions (Doroshenko et al. 2022), pessimistically rounded, which gives lower figures.
It is for continuous noise: the privacy loss of several discrete samples together is not that of one continuous one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from archipel.errors import MissingExtraError, PolicyError
from archipel.privacy.events import Event, Gaussian, Poisson, Repeated

if TYPE_CHECKING:
    from dp_accounting import DpEvent, PrivacyAccountant

AccountantName = Literal["rdp", "pld"]


def spent_epsilon(events: Iterable[Event], delta: float, accountant: AccountantName = "rdp") -> float:
    """The epsilon for which all events together are (epsilon, delta)-differentially private.

    Arguments:
        events: in any order; whose later events depend on the results of earlier ones.
        delta: above 0 and below 1; choose it below 1 / (number of units).
        accountant: "rdp" or "pld".

    Returns 0 without events. Raises PolicyError for a delta out of bounds or another accountant, MissingExtraError
    without dp-accounting.

    Example:
        epsilon = spent_epsilon([Gaussian(noise_multiplier=10.0)] * 100, delta=1e-6)
    """
    check_delta(delta)
    made = new_accountant(accountant)
    # Equal events once: the accountants' time is that of the different ones.
    counts: Counter[Gaussian | Poisson] = Counter()
    for event in events:
        plain, count = (event.event, event.count) if isinstance(event, Repeated) else (event, 1)
        counts[plain] += count
    if not counts:
        return 0.0
    for plain, count in counts.items():
        made.compose(as_dp_event(plain), count)
    return float(made.get_epsilon(delta))


def check_delta(delta: float) -> None:
    """Raises PolicyError unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise PolicyError(f"delta: {delta} is not above 0 and below 1; choose it below 1 / (number of devices)")


def new_accountant(name: AccountantName) -> PrivacyAccountant:
    """An empty accountant of dp-accounting. Raises PolicyError for another name, MissingExtraError."""
    library = import_library()
    if name == "rdp":
        return library.rdp.RdpAccountant()
    if name == "pld":
        return library.pld.PLDAccountant()
    raise PolicyError(f"accountant: there is no {name!r}; there are: rdp, pld")


def as_dp_event(event: Event) -> DpEvent:
    """The event as dp-accounting has it."""
    library = import_library()
    if isinstance(event, Gaussian):
        return library.GaussianDpEvent(event.noise_multiplier)
    if isinstance(event, Poisson):
        return library.PoissonSampledDpEvent(event.probability, as_dp_event(event.event))
    return library.SelfComposedDpEvent(as_dp_event(event.event), event.count)


def import_library() -> Any:
    """dp-accounting, whose import takes a second or more: only where an epsilon is asked for."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("dp_accounting", "attr", "tree", "absl", "scipy", "mpmath"):
            raise
        raise MissingExtraError("dp-accounting", "privacy") from None
    return dp_accounting
