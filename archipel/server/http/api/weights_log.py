"""The weights log: devices and auditors read it to see where weights come from."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.protocol.messages import Endorsement, WeightsLog
from archipel.protocol.operator.tasks import EntryQuery
from archipel.server.database.tables import Device
from archipel.server.http.problems import refuse
from archipel.server.http.routes import DEVICE, READ, Call, Route
from archipel.server.rounds import weights_log


def read_weights_log(call: Call[None], name: str, digest: str) -> WeightsLog:
    """Entries of the log of a bundle's weights, oldest first; none if no training began with the bundle."""
    with call.services.database.read() as session:
        _require(session, call, name, digest)
        return weights_log.read(session, name, digest, call.query.after)


def weights_endorsement(call: Call[None], name: str, digest: str, number: str) -> bytes:
    """The signatures of a secure round's devices, which are the evidence for one entry."""
    with call.services.database.read() as session:
        _require(session, call, name, digest)
        endorsement = weights_log.evidence(session, name, digest, int(number))
    if endorsement is None:
        raise refuse(404, f"no entry {number} of a secure round in the weights log of bundle {digest}")
    return endorsement


def _require(session: Session, call: Call[None], population: str, bundle: str) -> None:
    if not call.identity.device_id:
        call.identity.require(population)
        return
    own = session.scalar(select(Device.population).where(Device.device_id == call.identity.device_id))
    # An edge server hands the root's log on to its devices.
    if own is None or (own != population and not weights_log.hands_on(session, own, bundle, population)):
        raise refuse(404, f"no population {population!r} of this device")


_LOG = "/v1/populations/<name:name>/weights-log/<digest:digest>"

ROUTES = (
    Route("GET", _LOG, DEVICE | READ, read_weights_log, response=WeightsLog, query=EntryQuery),
    Route("GET", f"{_LOG}/<number:number>/endorsement", DEVICE | READ, weights_endorsement, response=Endorsement),
)
