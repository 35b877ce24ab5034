"""FedPer (Arivazhagan et al. 2019, "Federated learning with personalization layers", algorithms 1 and 2).

Device half: the device trains shared body and personal head together, in every step. The head stays on the device.
Server half: federated averaging of the body.
"""

from __future__ import annotations

from collections.abc import Sequence

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Upload, check_patterns
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload, *, personal: str | Sequence[str]) -> DeviceHalf:
    """`personal` are globs of the head's tensors."""
    return DeviceHalf(finish=weighted_deltas(upload), personal=check_patterns(upload.strategy, "personal", personal))


STRATEGY = averaging.strategy("fedper", device)
