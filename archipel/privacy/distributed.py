"""Distributed differential privacy: devices add shares of noise to their vectors before they mask them.

The server sees sums with noise alone, so devices trust it neither to add it nor to forget a sum without. The account is
of the plan's noise (archipel.protocol.noised.shares): a round is planned for the fewest devices that it accepts, less
those that may work with the server, and costs what those that were in it make of it. With mechanism "local" the server
sees updates, each with all the noise, and the account is of one device's noise.
"""

from __future__ import annotations

import msgspec

from archipel.bundle import Manifest
from archipel.errors import PolicyError
from archipel.privacy.events import Gaussian
from archipel.protocol.bounds import entries
from archipel.protocol.messages import RoundPlan
from archipel.protocol.noised.group import noised_group
from archipel.protocol.noised.layout import padded_length
from archipel.protocol.noised.shares import choose_share, noise_multiplier
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.policy import noisy_devices
from archipel.protocol.uploads import plan_layout, upload_layout


def add_share(
    plan: RoundPlan, settings: DifferentialPrivacy, manifest: Manifest, devices: int | None = None
) -> RoundPlan:
    """The plan of a training's round, with the noise of each device and the modulus that holds their sum.

    Arguments:
        plan: without noise.
        settings: of mechanism "distributed" or "local"; where they are not settled yet, the noise has a size to check
            with.
        manifest: the bundle's.
        devices: whose noise has to be enough; None: the fewest that the plan and the policy allow.

    Raises PolicyError where noise cannot cover what devices send, or is more than 32 bits hold; ProtocolError where no
    modulus holds the sum.
    """
    least = manifest.privacy.noise_multiplier
    multiplier = settings.noise_multiplier or least or 1.0
    group = noised_group(upload_layout(manifest, "training"), manifest.strategy, settings.mechanism)
    length = padded_length(sum(entries(port) for port in group.ports))
    share = choose_share(multiplier, length, devices or noisy_devices(plan, manifest.privacy))
    noised = msgspec.structs.replace(plan, noise=share, narrow=plan.privacy == "secure")
    bits = plan_layout(noised, manifest).modulus_bits(plan.max_cohort)
    return msgspec.structs.replace(noised, modulus_bits=bits)


def round_event(plan: RoundPlan, manifest: Manifest, devices: int) -> Gaussian:
    """What the sum of a round cost each device, where so many honest devices' noise is in it.

    Raises PolicyError for a plan without noise.
    """
    if plan.noise is None:
        raise PolicyError(f"round {plan.round_id}: its plan has no noise")
    return Gaussian(noise_multiplier=noise_multiplier(plan.noise, plan_layout(plan, manifest).length, devices))
