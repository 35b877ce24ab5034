"""The protocol of a simulation's secure rounds, as a server chooses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archipel.bundle.manifest import Manifest
from archipel.errors import SimulationError
from archipel.protocol.messages import Protocol, over_neighbours
from archipel.protocol.secagg_plus.choosing import choose_protocol, sizes_between
from archipel.protocol.secagg_plus.sizes import Sizes

if TYPE_CHECKING:
    from archipel.simulation.rounds import RoundSettings


def protocol_of_rounds(manifest: Manifest, settings: RoundSettings) -> Protocol | None:
    """The protocol of secure rounds; None where rounds are plain. Raises as `sizes_of_rounds`."""
    if settings.privacy != "secure":
        if settings.protocol is not None:
            raise SimulationError(f"protocol: {settings.protocol!r} is of secure rounds, these are plain; leave it out")
        return None
    policy, threshold = manifest.privacy, settings.pacing.threshold
    asked = settings.protocol
    if asked is None and settings.differential_privacy.is_distributed and "complete" in policy.protocols:
        asked = "complete"  # over neighbours a device can count on less noise of others
    return choose_protocol(policy, "training", seats_of(settings), asked=asked, threshold=threshold)


def sizes_of_rounds(manifest: Manifest, settings: RoundSettings) -> Sizes | None:
    """The sizes of rounds over neighbours; None where secure rounds are over the complete graph, or rounds plain.

    Raises SimulationError for a protocol of plain rounds, PolicyError for one that the bundle's policy does not allow,
    or where no number of neighbours is secure.
    """
    if not over_neighbours(protocol_of_rounds(manifest, settings)):
        return None
    return sizes_between(manifest.privacy, seats_of(settings))


def seats_of(settings: RoundSettings) -> int:
    """The largest number of devices in one sum: of a group, or of the cohort."""
    return -(-settings.cohort // max(settings.secure_groups, 1))
