"""Who is a member no longer, as devices believe it: a list that only ever grows.

Its entries come from the server, which may keep one back; but what it has once told a device it cannot take back, and a
list that a device has never seen must hold all that it has. A list that is full, MAX_REVOKED of a kind, takes no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from archipel.errors import CertificateError
from archipel.protocol.identity import VerifiedDevice, token_id
from archipel.protocol.messages import Revocations


@dataclass(frozen=True)
class Revoked:
    """Ids of devices and of enrolment tokens."""

    devices: frozenset[str] = frozenset()
    tokens: frozenset[str] = frozenset()

    @classmethod
    def of(cls, found: Revocations | None) -> Revoked:
        """Nobody where there is no list."""
        return NOBODY if found is None else cls(frozenset(found.devices), frozenset(found.tokens))

    def require_member(self, device: VerifiedDevice) -> None:
        """Raises CertificateError for a device that was revoked, or enrolled with a token that was."""
        if device.device_id in self.devices:
            raise CertificateError(f"cohort: device {device.device_id} was revoked")
        if token_id(device.token_key) in self.tokens:
            raise CertificateError(f"cohort: device {device.device_id} enrolled with a token that was revoked")


NOBODY = Revoked()


def check_successor(before: Revocations | None, found: Revocations | None, population: str) -> None:
    """Whether `found` may follow the last list that the device has seen. Raises CertificateError."""
    if found is not None and found.population != population:
        raise CertificateError(f"revocations: for population {found.population!r}, expected {population!r}")
    if before is None:
        return
    if found is None or found.epoch < before.epoch:
        told = "there is none" if found is None else f"the server's is {found.epoch}"
        raise CertificateError(f"revocations: this device has seen epoch {before.epoch}, {told}; it never goes back")
    for what, old, new in (("device", before.devices, found.devices), ("token", before.tokens, found.tokens)):
        lost = sorted(set(old) - set(new))
        if lost:
            raise CertificateError(f"revocations: {what} {lost[0]} is not in the server's list any more")
