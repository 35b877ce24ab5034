"""Where weights come from: the log in which a server accounts for every change of a bundle's weights.

A bundle's weights begin as the publisher signed them. Each training round is one entry of the log. The server signs it,
and it has the hash of the entry before, so a server cannot show one device two histories. The entry of a secure round
is endorsed: enough devices have signed that they were in that round, so the server cannot invent steps without rounds.
And no step is larger than honest devices can make it: the strategy computes a bound from the signed manifest alone, and
a device checks how far new weights are from weights that it has against the bounds of the steps between them.

A server may still lie about a round's sum, within the bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta

from archipel.bundle import Manifest
from archipel.errors import CertificateError, ProvenanceError
from archipel.protocol.identity import verify_chain
from archipel.protocol.messages import (
    Confirmation,
    Digest,
    Endorsement,
    Name,
    RoundId,
    RoundPlan,
    WeightsStatement,
    Whole,
    over_neighbours,
)
from archipel.protocol.policy import check_plan, endorsers_needed, plan_digest
from archipel.protocol.sealed import Sealed, decode, signed_bytes, unseal
from archipel.protocol.secagg.checks import survivors_digest
from archipel.protocol.secagg_plus.envelope import bind
from archipel.protocol.secagg_plus.inclusion import presence
from archipel.protocol.secagg_plus.member import Session
from archipel.protocol.secagg_plus.tree import HASH_BYTES
from archipel.protocol.uploads import plan_layout

FIRST = "0" * 64
"""The first entry's hash of the entry before."""
MAX_NODES = 1024
"""How many entries a device remembers of one log."""
MAX_TASKS = 256
"""For how many tasks a device remembers the newest entry, however old that is."""
MAX_ENTRY_BYTES = 1 << 14

Bound = Callable[[WeightsStatement], float]
"""How long a step can be, as an L2 norm over all parameters, as the strategy computes it. Raises ArchipelError."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checked entry.

    `parent` is the number of the entry that it changed, 0 for a start; `bound` how far its weights can be from the
    bundle's, as an L2 norm. `plain`: a step from the bundle's weights to these was not a secure round. `again`: the
    number of the newest rollback to it, else its own number.
    """

    number: Whole
    weights: Digest
    task: RoundId
    parent: Whole
    bound: Annotated[float, Meta(ge=0)]
    plain: bool
    again: Whole
    round: RoundId | None = None


class History(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device remembers of one log: the hash of entry `number`, and up to MAX_NODES entries, oldest first."""

    population: Name
    bundle: Digest
    number: Whole = 0
    head: Digest = FIRST
    nodes: Annotated[tuple[Node, ...], Meta(max_length=MAX_NODES)] = ()


class LogReader:
    """Reads a log on from where `history` ends, and checks each entry.

    Arguments:
        history: what the device remembers; of a new log only population and bundle.
        own: the digest of the bundle's own weights.
        server_key: the server's raw 32-byte public key.
        bound: how long the step of an entry can be.
    """

    def __init__(self, history: History, own: str, server_key: bytes, bound: Bound) -> None:
        self._population, self._bundle = history.population, history.bundle
        self.number, self._head = history.number, history.head
        self._own = own
        self._server_key = server_key
        self._bound = bound
        self._nodes = {node.number: node for node in history.nodes}
        self._rounds = {node.round for node in history.nodes if node.round is not None}
        self._newest: dict[tuple[str, str], int] = {}
        for node in history.nodes:
            self._name(node)

    @property
    def history(self) -> History:
        """What a device remembers: the newest entries, and two kinds that a later entry may name however old they are.

        These are the bundle's own weights, to which a rollback may go, and the newest entry of a paused task.
        """
        starts = [node.number for node in self._nodes.values() if not node.parent]
        newest = sorted({node.task: node.number for node in self._nodes.values()}.values())
        kept = {*starts[-1:], *newest[-MAX_TASKS:]}
        # The index is negative, as MAX_NODES is more than MAX_TASKS + 1: the newest of the others fill what is left.
        kept |= set(sorted(self._nodes.keys() - kept)[len(kept) - MAX_NODES :])
        return History(
            population=self._population,
            bundle=self._bundle,
            number=self.number,
            head=self._head,
            nodes=tuple(node for node in self._nodes.values() if node.number in kept),
        )

    def add(self, sealed: Sealed) -> WeightsStatement:
        """Checks and adds the next entry; returns its statement.

        Raises ProvenanceError unless it follows the last entry and its weights follow from logged ones,
        CertificateError or MessageError where it is not an entry that the server signed.
        """
        entry = unseal("weights", sealed, self._server_key, WeightsStatement, limit=MAX_ENTRY_BYTES)
        where = f"weights log of bundle {self._bundle[:16]}..., entry {self.number + 1}"
        expected = (self._population, self._bundle, self.number + 1, self._head)
        if (entry.population, entry.bundle, entry.number, entry.previous) != expected:
            raise ProvenanceError(
                f"{where}: what the server sent does not follow the entries that this device has seen; it has changed "
                "its log, or lost a part of it. The publisher can begin anew with a new bundle"
            )
        if entry.kind == "start":
            if entry.weights != self._own or entry.task_id is None:
                raise ProvenanceError(f"{where}: a training starts with the bundle's own weights, this one with others")
            self._keep(entry, parent=0, bound=0.0, plain=False)
        elif entry.kind == "rollback":
            node = self.find(entry.weights)
            self._nodes[node.number] = msgspec.structs.replace(node, again=entry.number)
        else:
            self._step(entry, where)
        # Last: after an entry that is refused the reader still stands at the entry before.
        self.number, self._head = entry.number, entry_hash(sealed)
        return entry

    def find(self, weights: str, task: str = "") -> Node:
        """The newest entry with these weights, of `task` or of any. Raises ProvenanceError where there is none."""
        node = self.newest(weights, task)
        if node is None:
            raise ProvenanceError(
                f"weights {weights[:16]}...: not in the server's log of bundle {self._bundle[:16]}..., of which this "
                f"device knows {self.number} entries; the server cannot say where they come from"
            )
        return node

    def newest(self, weights: str, task: str = "") -> Node | None:
        """As `find`, but None where the device remembers no such entry."""
        number = self._newest.get((weights, task))
        return None if number is None else self._nodes[number]

    def bound_between(self, one: Node, other: Node) -> float:
        """How far apart the weights of two entries can be, as an L2 norm."""
        # Through their nearest common ancestor: `bound` adds up the steps from the start.
        common = max(self._path(one) & self._path(other), default=None)
        # Where the device remembers no common ancestor, they are as far apart as through the bundle's own weights.
        shared = 0.0 if common is None else self._nodes[common].bound
        return one.bound + other.bound - 2 * shared

    def steps_between(self, one: Node, other: Node) -> tuple[int, int]:
        """How many rounds lead back from the weights `one` to where `other` parted from them, and from there to those.

        Upper bounds where entries are forgotten.
        """
        first, second = self._path(one), self._path(other)
        if not first & second:
            return self.steps_to(one), self.steps_to(other)
        return len(first - second), len(second - first)

    def steps_to(self, node: Node) -> int:
        """How many rounds lead from the bundle's own weights to these; an upper bound where entries are forgotten."""
        # A path that reaches a start has each round once; else the log has no more rounds than entries.
        path = self._path(node)
        return len(path) - 1 if self._nodes[min(path)].parent == 0 else node.number

    def _step(self, entry: WeightsStatement, where: str) -> None:
        if entry.parent is None or entry.round_id is None or entry.task_id is None or entry.plan is None:
            raise ProvenanceError(f"{where}: a step names its task, round, plan and parent")
        # A round's endorsement vouches for one step: used twice, it would allow two steps of full length.
        if entry.round_id in self._rounds:
            raise ProvenanceError(f"{where}: round {entry.round_id} has made a step already")
        parent = self.find(entry.parent, entry.task_id)
        moved = self._bound(entry)
        if not 0 <= moved < math.inf:
            raise ProvenanceError(f"{where}: its step has no bound")
        self._rounds.add(entry.round_id)
        plain = parent.plain or entry.privacy != "secure"
        self._keep(entry, parent=parent.number, bound=parent.bound + moved, plain=plain)

    def _keep(self, entry: WeightsStatement, *, parent: int, bound: float, plain: bool) -> None:
        node = Node(
            number=entry.number,
            weights=entry.weights,
            task=entry.task_id or "",
            parent=parent,
            bound=bound,
            plain=plain,
            again=entry.number,
            round=entry.round_id,
        )
        self._nodes[node.number] = node
        self._name(node)

    def _name(self, node: Node) -> None:
        # Nodes come in the order of their numbers, so the newest overwrites older ones. "" stands for any task.
        self._newest[node.weights, node.task] = self._newest[node.weights, ""] = node.number

    def _path(self, node: Node) -> set[int]:
        path = {node.number}
        while node.parent in self._nodes:
            node = self._nodes[node.parent]
            path.add(node.number)
        return path


def entry_hash(sealed: Sealed) -> str:
    """SHA-256 (hex) of the entry's body, which the next entry has as `previous`."""
    return hashlib.sha256(sealed.body).hexdigest()


def check_endorsement(
    entry: WeightsStatement,
    evidence: Endorsement,
    manifest: Manifest,
    log: LogReader,
    *,
    server_key: bytes,
    enrolment_key: bytes,
) -> None:
    """Checks that a secure round made the step of `entry`.

    The round's plan must be of this bundle, within its privacy policy, and begin with the weights that `entry` changed;
    enough of its survivors (`policy.endorsers_needed`) must have signed that they were in it. Raises a ProtocolError
    that says what is missing.
    """
    where = f"weights log, entry {entry.number}, round {entry.round_id}"
    if plan_digest(evidence.plan) != entry.plan:
        raise ProvenanceError(f"{where}: the server shows another plan than the entry names")
    plan = unseal("plan", evidence.plan, server_key, RoundPlan)
    if (plan.round_id, plan.task_id, plan.bundle) != (entry.round_id, entry.task_id, entry.bundle):
        raise ProvenanceError(f"{where}: its plan is of another round, task or bundle")
    if plan.kind != "training" or plan.privacy != "secure":
        raise ProvenanceError(f"{where}: its plan is of a {plan.privacy} {plan.kind} round, not of a secure training")
    # An asynchronous round's sum is added to the newest version, which may be later than the one that it began with.
    if plan.weights != entry.parent and plan.staleness_exponent is None:
        raise ProvenanceError(f"{where}: its plan began with other weights than the entry's parent")
    log.find(plan.weights, plan.task_id)
    check_plan(plan, manifest.privacy, plan_layout(plan, manifest))
    survivors = set(evidence.survivors.devices)
    _check_leaves(entry, plan, manifest, len(survivors), where)
    if len(survivors) != entry.devices or len(survivors) < max(plan.threshold, plan.min_cohort):
        raise ProvenanceError(
            f"{where}: {len(survivors)} survivors; the entry names {entry.devices}, the plan needs "
            f"{max(plan.threshold, plan.min_cohort)}"
        )
    signed = _signed_by_devices(evidence, plan, where)
    # A set: one device that signs twice counts once. Its signature counts only under a chain of the enrolment key, so
    # that the server cannot invent devices.
    counted: set[str] = set()
    for endorser in evidence.endorsers:
        device = verify_chain(endorser.chain, enrolment_key, population=entry.population)
        if device.kind != (expected := "aggregator" if plan.levels else "device"):
            raise ProvenanceError(
                f"{where}: {device.device_id}, which signed, is of kind {device.kind}, expected {expected}"
            )
        if device.device_id not in survivors:
            raise ProvenanceError(f"{where}: {device.device_id}, which signed, is not one of the survivors")
        try:
            Ed25519PublicKey.from_public_bytes(device.device_key).verify(endorser.signature, signed)
        except (InvalidSignature, ValueError):
            raise CertificateError(f"{where}: the confirmation of {device.device_id} does not verify") from None
        counted.add(device.device_id)
    if len(counted) < (needed := endorsers_needed(plan)):
        raise ProvenanceError(f"{where}: {len(counted)} devices signed that they were in it, {needed} are needed")


def _check_leaves(entry: WeightsStatement, plan: RoundPlan, manifest: Manifest, sites: int, where: str) -> None:
    """Checks that so many sites can have had so many devices, which the step's bound counts on."""
    policy = manifest.privacy.aggregators
    least, most = (sites * policy.min_site_cohort, sites * plan.site) if plan.levels and policy else (0, 0)
    if not least <= entry.leaves <= most:
        raise ProvenanceError(f"{where}: {entry.leaves} devices below {sites} sites, expected from {least} to {most}")


def _signed_by_devices(evidence: Endorsement, plan: RoundPlan, where: str) -> bytes:
    """The bytes that all endorsers signed."""
    if over_neighbours(plan.protocol):
        # They signed the round, its plan and the root of their cohort; each knows its neighbours only.
        if len(evidence.confirmation) != HASH_BYTES:
            raise ProvenanceError(
                f"{where}: its cohort's root has {len(evidence.confirmation)} bytes, not {HASH_BYTES}"
            )
        return presence(bind(Session(plan.round_id, plan_digest(evidence.plan)), evidence.confirmation))
    # All confirmations of a round are the same bytes (secagg.checks), so one body and the signatures are enough.
    confirmed = decode("confirmation", evidence.confirmation, Confirmation)
    expected = (plan.round_id, plan_digest(evidence.plan), survivors_digest(evidence.survivors))
    if (confirmed.round_id, confirmed.plan, confirmed.survivors) != expected:
        raise ProvenanceError(f"{where}: what the devices signed is of another round, plan or survivor set")
    return signed_bytes("confirmation", evidence.confirmation)


def check_layout(what: str, weights: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> None:
    """Checks that names, shapes and dtypes are the same. Raises ProvenanceError."""
    if weights.keys() != others.keys():
        raise ProvenanceError(f"{what}: its tensors are {sorted(weights)[:3]}..., expected {sorted(others)[:3]}...")
    for name, array in weights.items():
        other = others[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            raise ProvenanceError(
                f"{what}: tensor {name!r} is {array.dtype}{list(array.shape)}, "
                f"expected {other.dtype}{list(other.shape)}"
            )


def check_distance(
    what: str, weights: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray], bound: float, steps: int
) -> None:
    """Checks that two sets of the same tensors are at most `bound` apart, as an L2 norm over all elements.

    It also allows for the rounding of `steps` additions in float32. Raises ProvenanceError where they are farther apart
    or where names, shapes or dtypes differ.
    """
    check_layout(what, weights, others)
    distance = size = 0.0  # both squared
    for name, array in weights.items():
        other = others[name]
        one, two = array.astype(np.float64).ravel(), other.astype(np.float64).ravel()
        distance += float(np.sum((one - two) ** 2))
        size += float(max(np.dot(one, one), np.dot(two, two)))
    # A step rounds each element by half a unit in the last place, 2^-24 of it; twice that, and `bound` added to the
    # size, covers steps whose elements were larger than at either end.
    allowed = bound + steps * 2.0**-23 * (math.sqrt(size) + bound)
    if not math.isfinite(size) or math.sqrt(distance) > allowed:
        raise ProvenanceError(
            f"{what}: {math.sqrt(distance):.4g} away from weights that this device knows, where {steps} rounds can "
            f"move them by {allowed:.4g} at most; these are not the weights that the server says they are"
        )
