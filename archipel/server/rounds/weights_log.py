"""The weights log: one entry for every change of a bundle's weights, see archipel.protocol.provenance.

An entry is appended in the transaction that makes the change, so neither is there without the other.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from archipel.bundle import write_weights
from archipel.errors import ServerError
from archipel.protocol.identity import read_chain
from archipel.protocol.messages import (
    MAX_ENTRIES,
    Chain,
    Endorsement,
    Endorser,
    Survivors,
    WeightsLog,
    WeightsStatement,
    over_neighbours,
)
from archipel.protocol.policy import endorsers_needed
from archipel.protocol.provenance import FIRST, entry_hash
from archipel.protocol.sealed import Sealed, decode, encode, seal, signed_bytes
from archipel.protocol.secagg_plus.envelope import bind
from archipel.protocol.secagg_plus.inclusion import presence
from archipel.protocol.secagg_plus.messages import Answer as NeighboursAnswer
from archipel.protocol.secagg_plus.messages import unpack
from archipel.protocol.vector import DecodedSum
from archipel.server.audit import log as audit
from archipel.server.database.registry_tables import Model, ModelVersion
from archipel.server.database.tables import Answer, Device, Round, Task, WeightsEntry
from archipel.server.database.task_requests import read_plan, request_of

if TYPE_CHECKING:
    from archipel.server.rounds.aggregation import NewVersion
    from archipel.server.rounds.frozen import FrozenRounds


@dataclass(frozen=True)
class Log:
    """The weights log of one bundle in one population. `key` is the server's: it signs the entries."""

    population: str
    bundle: str
    key: Ed25519PrivateKey


def start(session: Session, log: Log, *, task_id: str, weights: str) -> None:
    """Log that training `task_id` begins with the bundle's own weights."""
    _append(session, log, kind="start", weights=weights, task_id=task_id)


def step(
    session: Session, log: Log, current: Round, task: Task, version: NewVersion, devices: int, leaves: int = 0
) -> None:
    """Log that the round has changed the task's model into that of `version`, with the updates of so many `devices`, or
    of `leaves` devices below so many edge servers."""
    _append(
        session,
        log,
        version.evidence,
        kind="step",
        weights=version.weights,
        task_id=task.task_id,
        parent=task.model,
        round_id=current.round_id,
        plan=current.plan_digest,
        privacy=task.privacy,
        sum=version.sum_digest,
        devices=devices,
        # Sorted, so that the same step always gives the same bytes to sign.
        hyperparameters=dict(sorted(request_of(task).hyperparameters.items())),
        leaves=leaves,
    )


def roll_back(session: Session, log: Log, weights: str | None) -> None:
    """Log that devices shall run earlier weights again, which later ones have replaced (None: the bundle's own)."""
    session.flush()
    if weights is None:
        own = select(WeightsEntry.weights).where(*_of(log), WeightsEntry.kind == "start").limit(1)
        weights = session.scalar(own)
    if weights is not None:  # else nothing was ever trained from this bundle
        _append(session, log, kind="rollback", weights=weights)


def go_back(session: Session, key: Ed25519PrivateKey, model: str, version: int | None) -> None:
    """Log that the model's devices shall run this earlier version again, instead of one that was offered later."""
    target = session.get_one(ModelVersion, (model, version))
    population = session.get_one(Model, model).population
    roll_back(session, Log(population, target.bundle, key), target.weights)


def is_logged(session: Session, population: str, bundle: str, weights: str) -> bool:
    """Whether an entry of the bundle's log has these weights: of the root's log where a tree trains the bundle."""
    query = select(WeightsEntry.number).where(
        or_(
            WeightsEntry.population == population,
            WeightsEntry.population.in_(select(Task.upstream).where(*_of_tree(population, bundle))),
        ),
        WeightsEntry.bundle == bundle,
        WeightsEntry.weights == weights,
    )
    return session.scalar(query.limit(1)) is not None


def hands_on(session: Session, population: str, bundle: str, root: str) -> bool:
    """Whether devices of the population read the log of the root's population `root` here."""
    query = select(Task.task_id).where(*_of_tree(population, bundle), Task.upstream == root)
    return session.scalar(query.limit(1)) is not None


def _of_tree(population: str, bundle: str) -> tuple[ColumnElement[bool], ...]:
    return Task.population == population, Task.bundle == bundle, Task.upstream.is_not(None)


def read(session: Session, population: str, bundle: str, after: int) -> WeightsLog:
    """At most MAX_ENTRIES entries after number `after`, oldest first."""
    where = (WeightsEntry.population == population, WeightsEntry.bundle == bundle)
    rows = session.scalars(
        select(WeightsEntry.statement)
        .where(*where, WeightsEntry.number > after)
        .order_by(WeightsEntry.number)
        .limit(MAX_ENTRIES)
    )
    # Of the whole log: it tells a device how much is still to come, and whether entries that it knows are gone.
    newest = session.scalar(select(func.max(WeightsEntry.number)).where(*where))
    return WeightsLog(entries=[decode("weights", row, Sealed) for row in rows], newest=newest or 0)


def evidence(session: Session, population: str, bundle: str, number: int) -> bytes | None:
    """JSON of the Endorsement of entry `number`; None where there is none."""
    row = session.get(WeightsEntry, (population, bundle, number))
    return None if row is None else row.evidence


def sum_digest(total: DecodedSum) -> str:
    """SHA-256 (hex) of the sum's arrays as safetensors."""
    arrays = {f"delta/{name}": array for name, array in total.deltas.items()}
    arrays |= {f"value/{name}": array for name, array in total.values.items()}
    arrays |= {f"moment/{name}": array for name, array in total.moments.items()}
    return hashlib.sha256(write_weights(arrays)).hexdigest()


def _append(session: Session, log: Log, evidence: bytes | None = None, /, **fields: object) -> None:
    # Transactions append one after the other, or two entries would have the same number. One lock serves for this log
    # and the audit log.
    audit.take_turn(session)
    last = session.execute(
        select(WeightsEntry.number, WeightsEntry.hash).where(*_of(log)).order_by(WeightsEntry.number.desc()).limit(1)
    ).one_or_none()
    number, previous = (last.number + 1, last.hash) if last else (1, FIRST)
    statement = WeightsStatement(
        population=log.population,
        bundle=log.bundle,
        number=number,
        previous=previous,
        **fields,  # type: ignore[arg-type]
    )
    sealed = seal("weights", statement, log.key)
    session.add(
        WeightsEntry(
            population=log.population,
            bundle=log.bundle,
            number=number,
            kind=statement.kind,
            weights=statement.weights,
            hash=entry_hash(sealed),
            statement=encode(sealed),
            evidence=evidence,
        )
    )
    session.flush()


def endorsement(session: Session, frozen: FrozenRounds, current: Round) -> bytes | None:
    """JSON of the messages.Endorsement of a secure round: what enough of its devices signed.

    Returns None for a plain round. Raises ServerError where fewer signatures can be shown.
    """
    plan = read_plan(current)
    if plan.privacy == "plain":
        return None
    neighbours, needed = over_neighbours(plan.protocol), endorsers_needed(plan)
    phase = "unmasking" if neighbours else "confirming"
    rows = session.execute(
        select(Device.chain, Answer.body)
        .join(Device, Device.device_id == Answer.device_id)
        .where(Answer.round_id == current.round_id, Answer.phase == phase, Answer.body.is_not(None))
        .order_by(Answer.device_id)
    )
    cohort = frozen.roster(session, current.round_id) if neighbours else None
    # All devices have signed the same body: a confirmation of other survivors is refused when it arrives.
    endorsers, body = [], b""
    for row in rows:
        if cohort is None:
            confirmation = decode("confirmation", row.body, Sealed)
            body, signature = confirmation.body, confirmation.signature
            signed = signed_bytes("confirmation", confirmation.body)
        else:
            # Over neighbours devices sign the cohort that they were in.
            body, signature = cohort.roster.root, unpack(row.body, NeighboursAnswer).presence
            signed = presence(bind(cohort.session, body))
        chain = _chain_at_signing(decode("chain", row.chain, Chain), signature, signed)
        if chain is not None:
            endorsers.append(Endorser(chain=chain, signature=signature))
    if len(endorsers) < needed:
        raise ServerError(f"{len(endorsers)} devices signed that they were in the round, not {needed}")
    survivors = select(Answer.device_id).where(Answer.round_id == current.round_id, Answer.phase == "masking")
    return encode(
        Endorsement(
            plan=decode("plan", current.plan, Sealed),
            survivors=Survivors(devices=sorted(session.scalars(survivors))),
            confirmation=body,
            endorsers=endorsers[:needed],  # as many as a verifier needs; each has a chain of certificates
        )
    )


def _chain_at_signing(chain: Chain, signature: bytes, signed: bytes) -> Chain | None:
    """The device's chain as it was when it signed: it may have replaced its key since.

    The newest key that verifies the signature is the one; None if no key of the chain does.
    """
    # From the newest key back, because most devices have not replaced theirs during the round.
    for length in range(len(chain.rotations), -1, -1):
        earlier = Chain(token=chain.token, identity=chain.identity, rotations=chain.rotations[:length])
        with suppress(InvalidSignature, ValueError):
            Ed25519PublicKey.from_public_bytes(read_chain(earlier)[1]).verify(signature, signed)
            return earlier
    return None


def _of(log: Log) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return WeightsEntry.population == log.population, WeightsEntry.bundle == log.bundle
