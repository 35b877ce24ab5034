"""Decides which versions a device is offered: the promoted ones, or a rollout's candidate for devices of its stage.

The offers of a population are read again only when its serial has changed, and signed once for all devices. A version
whose bundle has expired is not offered: devices would refuse it and keep the version that they run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import and_, bindparam, select
from sqlalchemy.orm import aliased

from archipel.protocol.eligibility import Attributes
from archipel.protocol.messages import Offer
from archipel.protocol.sealed import Sealed, seal
from archipel.server.database.engine import Database
from archipel.server.database.registry_tables import Model, ModelVersion, OfferSerial, Rollout
from archipel.server.database.tables import BundleRow
from archipel.server.devices.targeting import Target
from archipel.server.registry.expiry import expiry, has_expired
from archipel.server.settings import Settings


@dataclass(frozen=True)
class Offered:
    """One version, signed. Its bundle expires at `not_after` (Unix seconds; 0: never)."""

    version: int
    sealed: Sealed
    not_after: int


@dataclass(frozen=True)
class Standing:
    """The offers of one model: `candidate` for the devices of `target`, and `promoted` for all others."""

    model: str
    promoted: Offered
    candidate: Offered | None = None
    target: Target | None = None

    def of(self, device_id: str, attributes: Attributes) -> Offered:
        """The version that this device is to run."""
        if self.candidate is not None and self.target is not None and self.target.takes(device_id, attributes):
            return self.candidate
        return self.promoted


_candidate = aliased(ModelVersion)
_bundle, _candidate_bundle = aliased(BundleRow), aliased(BundleRow)
_STANDINGS = (
    select(
        OfferSerial.serial,
        Model.name,
        ModelVersion.number,
        ModelVersion.bundle,
        ModelVersion.weights,
        _bundle.manifest,
        Rollout.rollout_id,
        Rollout.eligibility,
        Rollout.salt,
        Rollout.percent,
        _candidate.number.label("candidate_number"),
        _candidate.bundle.label("candidate_bundle"),
        _candidate.weights.label("candidate_weights"),
        _candidate_bundle.manifest.label("candidate_manifest"),
    )
    # One statement, so that the serial belongs to what is read with it.
    .select_from(OfferSerial)
    .join(Model, Model.population == OfferSerial.population)
    .join(ModelVersion, and_(ModelVersion.model == Model.name, ModelVersion.number == Model.promoted))
    .join(_bundle, _bundle.digest == ModelVersion.bundle)
    .outerjoin(Rollout, and_(Rollout.model == Model.name, Rollout.ended.is_(None)))
    .outerjoin(_candidate, and_(_candidate.model == Model.name, _candidate.number == Rollout.version))
    .outerjoin(_candidate_bundle, _candidate_bundle.digest == _candidate.bundle)
    .where(OfferSerial.population == bindparam("population"))
    .order_by(Model.name)
)


class Offers:
    """The offers of each population, as of the newest serial that this process has seen."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._known: dict[str, tuple[int, tuple[Standing, ...]]] = {}
        self._lock = threading.Lock()

    def to(
        self,
        population: str,
        serial: int,
        device_id: str,
        attributes: Attributes,
        fetched: Mapping[str, int],
        *,
        now: float,
    ) -> list[Sealed]:
        """The signed offers that are news to a device: versions that it is to run and has not fetched.

        Arguments:
            population: The device's.
            serial: The population's, as the caller has just read it.
            device_id: 32 hexadecimal digits.
            attributes: As the device reported them; they decide whether it belongs to a rollout's target.
            fetched: The version of each model that the device fetched last.
            now: Unix seconds. A bundle that has expired by then is not offered.
        """
        with self._lock:
            known = self._known.get(population)
        # `known` is newer than `serial` if another thread has read in between. The newer state is the right one then.
        if known is None or known[0] < serial:
            known = self._read(population)
        wanted = ((each.model, each.of(device_id, attributes)) for each in known[1])
        return [
            offered.sealed
            for model, offered in wanted
            # Expiry is decided for each call, because it comes without a new serial.
            if fetched.get(model) != offered.version and not has_expired(offered.not_after, now)
        ]

    def _read(self, population: str) -> tuple[int, tuple[Standing, ...]]:
        with self._database.read() as session:
            rows = session.execute(_STANDINGS, {"population": population}).all()
        # No row: nothing is promoted. The serial 0 is below every real one, so the next call reads again.
        serial, standings = rows[0].serial if rows else 0, []
        for row in rows:
            promoted = self._offered(
                row.manifest, population=population, model=row.name, version=row.number, bundle=row.bundle,
                weights=row.weights, serial=serial,
            )  # fmt: skip
            if row.rollout_id is None:
                standings.append(Standing(row.name, promoted))
                continue
            candidate = self._offered(
                row.candidate_manifest, population=population, model=row.name, version=row.candidate_number,
                bundle=row.candidate_bundle, weights=row.candidate_weights, rollout=row.rollout_id, serial=serial,
            )  # fmt: skip
            standings.append(Standing(row.name, promoted, candidate, Target(row.eligibility, row.salt, row.percent)))
        read = (serial, tuple(standings))
        with self._lock:
            # Another thread may have read a newer state meanwhile, which must stay.
            before = self._known.get(population)
            if before is None or before[0] <= serial:
                self._known[population] = read
        return read

    def _offered(self, manifest: bytes, **fields: object) -> Offered:
        # Signed here, once for all devices: an offer names no device.
        offer = Offer(**fields)  # type: ignore[arg-type]
        return Offered(offer.version, seal("offer", offer, self._settings.private_key), expiry(manifest))
