"""The noise of a simulation's devices, planned as a server plans it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from archipel.bundle.manifest import Manifest
from archipel.errors import SimulationError
from archipel.privacy.distributed import add_share, round_event
from archipel.protocol.messages import RoundPlan
from archipel.protocol.policy import colluders_of, least_cohort, noisy_devices, smallest_threshold
from archipel.simulation.secure.protocol import protocol_of_rounds, seats_of, sizes_of_rounds

if TYPE_CHECKING:
    from archipel.simulation.rounds import RoundSettings

_NOBODY = "0" * 64


def plan_noise(manifest: Manifest, settings: RoundSettings) -> RoundPlan | None:
    """A plan whose devices add noise; None where they add none.

    Raises PolicyError for noise that does not go with the bundle, ProtocolError where no modulus holds a sum with it.
    """
    if not settings.differential_privacy.on_devices:
        return None
    policy, seats = manifest.privacy, seats_of(settings)
    sizes = sizes_of_rounds(manifest, settings)
    if settings.privacy == "plain":
        plan = RoundPlan(
            round_id="0" * 32, task_id="0" * 32, number=1, bundle=_NOBODY, weights=_NOBODY, privacy="plain",
            min_cohort=1, max_cohort=seats, threshold=1, modulus_bits=32,
        )  # fmt: skip
        return add_share(plan, settings.differential_privacy, manifest)
    plan = RoundPlan(
        round_id="0" * 32, task_id="0" * 32, number=1, bundle=_NOBODY, weights=_NOBODY, privacy="secure",
        min_cohort=settings.pacing.min_cohort, max_cohort=seats,
        threshold=settings.pacing.threshold or smallest_threshold(policy, seats), modulus_bits=32,
        colluders=colluders_of(policy, seats),
    )  # fmt: skip
    if sizes is not None:
        protocol = protocol_of_rounds(manifest, settings)
        plan = msgspec.structs.replace(plan, protocol=protocol, **asdict(sizes))
        # A semi-honest server takes care that so many stay.
        plan = msgspec.structs.replace(plan, min_cohort=max(plan.min_cohort, policy.min_cohort + plan.colluders))
    return add_share(plan, settings.differential_privacy, manifest)


def multiplier_of(plan: RoundPlan, manifest: Manifest, devices: int) -> float:
    """The noise multiplier of the sum of so many devices. Raises SimulationError for fewer than the noise is for."""
    needed = max(plan.min_cohort, plan.threshold) if plan.protocol == "complete" else least_cohort(plan)
    if devices < needed:
        raise SimulationError(f"{devices} devices are fewer than the {needed} that their noise is planned for")
    return round_event(plan, manifest, noisy_devices(plan, manifest.privacy, devices)).noise_multiplier
