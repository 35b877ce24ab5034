"""Rounds that are really masked: the state machines of secure aggregation run for the whole cohort, in this process.

Each device has an identity and a certificate of its own, as after enrolment. Their messages pass from hand to hand
where a server would pass them on; those that dropped out after they shared keys are in the cohort, so their masks have
to be taken out of the sum by the others' shares.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import PrivacyPolicy
from archipel.errors import SimulationError
from archipel.protocol import Participant, add_masked, issue_identity, mint_token, public_bytes, seal, unmask_sum
from archipel.protocol.messages import (
    Chain,
    Cohort,
    Confirmations,
    Confirmed,
    EncryptedShare,
    Member,
    Protocol,
    RoundPlan,
    Shares,
    Survivors,
)
from archipel.protocol.narrow import pack_masked, reduce_sum, unpack_masked
from archipel.protocol.noised.layout import NoisedLayout
from archipel.protocol.policy import least_cohort, plan_digest
from archipel.protocol.secagg import KeyTree, hand_out_keys, merge_complaints
from archipel.protocol.secagg_plus.sizes import Sizes
from archipel.protocol.secagg_plus.terms import terms_of
from archipel.protocol.vector import Vector
from archipel.simulation.kept import GroupSums
from archipel.simulation.secure.neighbours import add_over_neighbours
from archipel.simulation.sums import SecureSum
from archipel.simulation.work import Engine, Partial, Work

_FEWEST = 2
_NOBODY = "0" * 64


class Masked:
    """An engine whose sums come out of secure aggregation. The devices train one after the other on the inner engine.

    Arguments:
        engine: runs the local rounds.
        policy: the bundle's.
        sizes: of rounds over neighbours; None: over the complete graph.
        protocol: of the rounds.
    """

    def __init__(
        self, engine: Engine, policy: PrivacyPolicy, sizes: Sizes | None = None, protocol: Protocol = "complete"
    ) -> None:
        self._engine, self._policy, self._sizes, self._protocol = engine, policy, sizes, protocol
        self._enrolment = Ed25519PrivateKey.generate()
        self._server = Ed25519PrivateKey.generate()
        self._identities: dict[int, tuple[Ed25519PrivateKey, Chain]] = {}
        self._serial = 0

    def run(self, work: Work, clients: Sequence[int]) -> Partial:
        """The sum of these devices' updates. Raises SimulationError where it is not that of the vectors without masks.

        Of fewer than two devices there is no sum: it would be one device's update.
        """
        if work.groups is not None:
            return self._run_groups(work, work.groups, clients)
        partial = Partial(work.empty_sum())
        vectors: dict[int, Vector] = {}
        mask = np.uint32(2 ** (work.modulus_bits or 32) - 1)
        for client in clients:
            own = self._engine.run(replace(work, dropped=()), [client])
            partial.reports += own.reports
            if own.counted:
                vectors[client] = _total(own) & mask
        if len(vectors) < _FEWEST:
            for report in partial.reports:
                report.left = report.left or "a secure sum needs two devices or more"
            return partial
        # Enough must be left to unmask, so of very many dropouts the others left before they shared keys.
        dropped = list(work.dropped)[: self._most_dropped(len(vectors))]
        plan = self._plan(work, len(vectors) + len(dropped))
        if len(vectors) + len(dropped) < (needed := least_cohort(plan)) and self._sizes is not None:
            for report in partial.reports:
                report.left = report.left or f"a secure sum over neighbours needs {needed} devices or more"
            return partial
        found = self._aggregate(work, plan, vectors, dropped)
        expected = np.sum(list(vectors.values()), axis=0, dtype=np.uint32) & mask
        if not np.array_equal(found, expected):
            raise SimulationError(f"round {work.number}: the unmasked sum is not that of the devices' vectors")
        _total(partial)[:] = found
        return partial

    def close(self) -> None:
        self._engine.close()

    def _run_groups(self, work: Work, groups: Mapping[int, int], clients: Sequence[int]) -> Partial:
        """Secure aggregation of each group by itself."""
        total = GroupSums(work.layout, work.modulus_bits or 32, work.cohort, groups)
        partial = Partial(total)
        for group in sorted({groups[client] for client in clients}):
            gone = tuple(client for client in work.dropped if groups[client] == group)
            alone = replace(work, groups=None, dropped=gone)
            part = self.run(alone, [client for client in clients if groups[client] == group])
            partial.reports += part.reports
            if part.counted and isinstance(part.total, SecureSum):
                total.put(group, part.total, part.counted)
        return partial

    def _most_dropped(self, present: int) -> int:
        """How many of a cohort may leave after they shared keys, where so many stay."""
        if self._sizes is None:
            return present - 1
        share = Fraction(str(self._policy.dropouts))
        return math.floor(present * share / (1 - share))

    def _aggregate(self, work: Work, plan: RoundPlan, vectors: dict[int, Vector], dropped: Sequence[int]) -> Vector:
        """The sum of the vectors, each masked by its device; `dropped` have shared keys and sent nothing."""
        digest = plan_digest(seal("plan", plan, self._server))
        if self._sizes is not None:
            return add_over_neighbours(
                vectors, dropped, terms=terms_of(plan, digest, self._policy), plan=plan, layout=work.layout,
                identity=self._identity, enrolment_key=public_bytes(self._enrolment),
            )  # fmt: skip
        everyone = sorted([*vectors, *dropped])
        devices = {client: self._participant(plan, digest, client) for client in everyone}
        names = {device.device_id: client for client, device in devices.items()}
        requests = {client: device.advertise() for client, device in devices.items()}
        cohort = Cohort(
            members=[
                Member(chain=self._identity(client)[1], advertisement=request.advertisement)
                for client, request in requests.items()
            ]
        )
        trees = {
            devices[client].device_id: KeyTree(each.envelope_keys, plan.max_cohort) for client, each in requests.items()
        }
        sent = {
            client: device.share(msgspec.structs.replace(cohort, keys=hand_out_keys(trees, device.device_id)))
            for client, device in devices.items()
        }
        inboxes: dict[str, list[EncryptedShare]] = {name: [] for name in names}
        for client, shares in sent.items():
            for share in shares.shares:
                inboxes[share.peer].append(msgspec.structs.replace(share, peer=devices[client].device_id))
        told = [devices[client].complain(Shares(shares=inboxes[devices[client].device_id])) for client in vectors]
        complaints = merge_complaints(told)
        total = np.zeros(work.layout.length, np.uint32)
        for client, vector in vectors.items():
            data = pack_masked(work.layout, devices[client].mask(vector, complaints), plan)
            add_masked(total, unpack_masked(work.layout, data, plan), plan.modulus_bits)
        survivors = Survivors(devices=sorted(devices[client].device_id for client in vectors))
        confirmations = Confirmations(
            confirmations=[
                Confirmed(device=devices[client].device_id, confirmation=devices[client].confirm(survivors))
                for client in vectors
            ]
        )
        answers = {devices[client].device_id: devices[client].unmask(confirmations) for client in vectors}
        found = unmask_sum(
            total, plan=plan, cohort=cohort, sharers=sorted(names), survivors=survivors.devices, answers=answers
        )
        return reduce_sum(work.layout, found, plan)

    def _plan(self, work: Work, devices: int) -> RoundPlan:
        self._serial += 1
        plan = RoundPlan(
            round_id=secrets.token_hex(16), task_id="0" * 32, number=work.number, bundle=_NOBODY, weights=_NOBODY,
            privacy="secure", min_cohort=_FEWEST, max_cohort=devices, threshold=devices // 2 + 1,
            modulus_bits=work.modulus_bits or 32, serial=self._serial,
            narrow=isinstance(work.layout, NoisedLayout)
            or any(port.carries is not None for port in work.layout.updates),
        )  # fmt: skip
        if self._sizes is None:
            return plan
        return msgspec.structs.replace(plan, protocol=self._protocol, **asdict(self._sizes))

    def _participant(self, plan: RoundPlan, digest: str, client: int) -> Participant:
        key, chain = self._identity(client)
        return Participant(plan, digest, key, chain, public_bytes(self._enrolment), secrets.token_bytes)

    def _identity(self, client: int) -> tuple[Ed25519PrivateKey, Chain]:
        if client not in self._identities:
            key, token = Ed25519PrivateKey.generate(), secrets.token_bytes(32)
            certificate = mint_token(self._enrolment, population="devices", not_after=2**33, seed=token)
            self._identities[client] = key, issue_identity(token, certificate, public_bytes(key))
        return self._identities[client]


def _total(partial: Partial) -> Vector:
    assert isinstance(partial.total, SecureSum)
    return partial.total.total
