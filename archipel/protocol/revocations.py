"""The list of revoked devices and tokens, as devices check it: it only ever grows.

The server makes the list and may keep an entry back. But a device never accepts a list without an entry that it has
seen, so the server cannot take a revocation back. A full list, with MAX_REVOKED of a kind, takes no further entries.
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
    def of(cls, revocations: Revocations | None) -> Revoked:
        """The ids in the server's list; none where there is no list."""
        if revocations is None:
            return NOBODY
        return cls(frozenset(revocations.devices), frozenset(revocations.tokens))

    def require_member(self, device: VerifiedDevice) -> None:
        """Raises CertificateError for a revoked device, or one that enrolled with a revoked token."""
        if device.device_id in self.devices:
            raise CertificateError(f"cohort: device {device.device_id} was revoked")
        if token_id(device.token_key) in self.tokens:
            raise CertificateError(f"cohort: device {device.device_id} enrolled with a token that was revoked")


NOBODY = Revoked()


def check_successor(before: Revocations | None, after: Revocations | None, population: str) -> None:
    """Raises CertificateError unless the list `after` may follow `before`, the last one that the device has seen."""
    if after is not None and after.population != population:
        raise CertificateError(f"revocations: for population {after.population!r}, expected {population!r}")
    if before is None:
        return
    if after is None or after.epoch < before.epoch:
        epoch = "there is none" if after is None else f"the server's is {after.epoch}"
        raise CertificateError(f"revocations: this device has seen epoch {before.epoch}, {epoch}; it never goes back")
    # The epoch alone proves nothing: a server can drop an entry and count on.
    for what, old, new in (("device", before.devices, after.devices), ("token", before.tokens, after.tokens)):
        lost = sorted(set(old) - set(new))
        if lost:
            raise CertificateError(f"revocations: {what} {lost[0]} is not in the server's list any more")
