"""An account as a server keeps it, row by row, against dp-accounting itself on twenty configurations."""

from __future__ import annotations

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

from archipel.privacy import Gaussian, Poisson, Repeated, read_events, spent_epsilon, write_events
from tests.privacy.test_accounting import BY_DEFINITION, SAMPLED

# Noise multiplier, steps, delta, sampling probability; the epsilon that was printed, and how far from it one may be.
PRINTED: dict[str, tuple[float, int, float, float, float, float]] = {
    "dp-accounting, rdp_privacy_accountant_test: noise of exactly (1, 1e-6)": (4.530877117, 1, 1e-6, 1.0, 1.0, 1e-6),
    # With a list of orders of its own.
    "JAX-Privacy, calibrate_test": (4.0, 10_000, 1e-5, 1024 / 50_000, 2.27535, 1e-3),
    # Training stops where epsilon would go beyond 1, so what is spent is less.
    "JAX-Privacy, cifar10_wrn_16_4_eps1": (10.0, 725, 1e-5, 4096 / 50_000, 0.9, 0.1),
    # A multiplier of 1 / sqrt(2 rho) for a zero-concentrated rho of 0.81.
    "Google, Spanish Gboard 2022: rho 0.81": (1 / 1.62**0.5, 1, 1e-10, 1.0, 8.9, 0.05),
}
CONFIGURATIONS = {
    **{name: (multiplier, steps, delta, q) for name, (q, multiplier, steps, delta, _, _) in SAMPLED.items()},
    **{f"of a federation, {place}": each for place, each in enumerate(BY_DEFINITION)},
    **{name: each[:4] for name, each in PRINTED.items()},
}


def of_account(multiplier: float, steps: int, delta: float, probability: float) -> float:
    """In two rows, stored and read again."""
    noise = Gaussian(noise_multiplier=multiplier)
    event = noise if probability == 1 else Poisson(probability=probability, event=noise)
    rows = [write_events([event]), *([write_events([Repeated(event=event, count=steps - 1)])] if steps > 1 else [])]
    return spent_epsilon([each for row in rows for each in read_events(row)], delta)


def test_there_are_twenty() -> None:
    assert len(CONFIGURATIONS) == 20


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.sampled(every=6)
def test_the_account_is_dp_accountings(name: str) -> None:
    multiplier, steps, delta, probability = CONFIGURATIONS[name]
    event = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(multiplier))
    expected = RdpAccountant().compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(delta)
    assert of_account(multiplier, steps, delta, probability) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", PRINTED)
def test_what_was_printed(name: str) -> None:
    *configuration, printed, tolerance = PRINTED[name]
    multiplier, steps, delta, probability = configuration
    assert of_account(multiplier, int(steps), delta, probability) == pytest.approx(printed, abs=tolerance)
