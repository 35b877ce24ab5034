"""Differential privacy that is accounted for: events, accountants, calibration, and noise on a cohort's sum."""

from archipel.privacy.accounting import AccountantName, spent_epsilon
from archipel.privacy.calibration import least_multiplier
from archipel.privacy.events import Event, Gaussian, Poisson, Repeated, read_events, write_events

__all__ = [
    "AccountantName",
    "Event",
    "Gaussian",
    "Poisson",
    "Repeated",
    "least_multiplier",
    "read_events",
    "spent_epsilon",
    "write_events",
]
