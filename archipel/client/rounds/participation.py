"""One round of this device, from the plan to its end: committed, failed, left or refused."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from archipel.client.conditions.owner_limits import OwnerLimits
from archipel.client.connection.identity import DeviceRecord
from archipel.client.connection.revocation_book import RevocationBook
from archipel.client.connection.session import DeviceSession
from archipel.client.connection.transport import Transport
from archipel.client.device import Device, Site, SiteRound
from archipel.client.events import Outcome
from archipel.client.memory.journal import OpenRound
from archipel.client.memory.privacy import noise_in_round
from archipel.client.rounds.exchange import LATER, Ended, LostError, Owner, SilentError
from archipel.client.rounds.neighbours import NeighbourRound
from archipel.client.rounds.plain import PlainRound
from archipel.client.rounds.secure import SecureRound
from archipel.client.rounds.settling import Settling
from archipel.client.rounds.work import (
    Contribution,
    Prepared,
    contribute,
    discount_stale,
    prepare,
    prepare_bundle,
    state_name,
)
from archipel.errors import (
    BundleError,
    CertificateError,
    ClientError,
    ConsistencyError,
    IndexRangeError,
    MessageError,
    NonFiniteLossError,
    OwnerRefusalError,
    PolicyError,
    ProtocolError,
    RefusedError,
    RoundAbandonedError,
    RuntimeInputError,
    RuntimeLimitError,
    RuntimeProgramError,
    SignatureError,
    TooLargeError,
    UnreachableError,
)
from archipel.lite_runtime import DeviceState
from archipel.protocol.messages import LeaveReason, RoundPlan, over_neighbours
from archipel.protocol.origin import check_origin
from archipel.protocol.plain import encode_plain
from archipel.protocol.policy import plan_digest, policy_of_members
from archipel.protocol.revocations import NOBODY, Revoked
from archipel.protocol.sealed import Sealed, encode
from archipel.protocol.secagg import Participant
from archipel.protocol.secagg_plus import participant as neighbours
from archipel.protocol.secagg_plus.terms import Terms, terms_of
from archipel.protocol.vector import Vector

_REFUSALS = (
    BundleError, PolicyError, RuntimeLimitError, RuntimeProgramError, RuntimeInputError, CertificateError, MessageError,
)  # fmt: skip
_LEAVING = (RoundAbandonedError, NonFiniteLossError, ProtocolError)


class Participation:
    """The device's part in one round; `sealed` is the plan as the server sealed it."""

    def __init__(
        self,
        device: Device,
        transport: Transport,
        session: DeviceSession,
        record: DeviceRecord,
        plan: RoundPlan,
        sealed: Sealed,
    ) -> None:
        self._device = device
        self._transport = transport
        self._session = session
        self._record = record
        self._plan = plan
        self._sealed = sealed
        self._digest = plan_digest(sealed)
        self._settling = Settling(device, transport, session)
        self._limits = OwnerLimits(device.config, record, device.journal)

    def run(self, wait: float) -> Outcome:
        """Take part in the round. The outcome has `wait`, unless the round is to be taken up again.

        Raises UnreachableError and RefusedError while it fetches what the round needs, and no later.
        """
        journal = self._device.journal.begin(self._plan, self._digest)
        self._device.emit("assigned", {"number": self._plan.number})
        return self._end(journal, lambda: self._carry_out(journal), wait)

    def resume(self, journal: OpenRound, wait: float) -> Outcome:
        """Go on with a round over neighbours that a restart interrupted, as `run` would.

        Owner, publisher and revocations are asked again. Where what the round needs is lost, damaged or of another
        round, the device leaves it.
        """
        self._device.emit("resumed", {})
        return self._end(journal, lambda: self._go_on(journal), wait)

    def _end(self, journal: OpenRound, work: Callable[[], Ended], wait: float) -> Outcome:
        try:
            ended = work()
        except LostError as error:
            if not journal.counted:
                return self._settling.abandon(journal, f"the agent was restarted in the round: {error}", wait)
            # The update is in the sum, so the result still matters; only the device's help for the others is lost.
            return self._settling.settle(journal, wait) or self._pause(str(error))
        except _REFUSALS as error:
            # Before keys are sent such an error is about plan, bundle or weights, which the device refuses. Later it is
            # about a message of peers or server, and the device leaves.
            kind: Literal["dropped", "refused"] = "dropped" if journal.keys_sent else "refused"
            return self._settling.end(journal, kind, str(error), wait, _why(error))
        except _LEAVING as error:
            left = isinstance(error, RoundAbandonedError)
            # Such a round goes on when the agent does, or when the server answers again.
            interrupted = isinstance(error, SilentError) or (left and self._device.gate.stop.is_set())
            if left and journal.counted:
                outcome = self._settling.settle(journal, wait)
                if outcome is not None:
                    return outcome
            elif (journal.keys_sent or not left) and not (interrupted and journal.entry.resumes):
                # Where the server does not go on with this device it knows; and while the owner's conditions do not
                # hold, nothing is sent.
                return self._settling.end(journal, "dropped", str(error), wait, _why(error), tell=not left)
            # The round stays open in the journal. If no keys were sent, the device may take it up again; if its update
            # counts, the next check-in asks for the result.
            return self._pause(str(error))
        except ClientError as error:
            if isinstance(error, UnreachableError) or (isinstance(error, RefusedError) and error.status in LATER):
                # These come from fetching only, since RoundExchange raises RoundAbandonedError instead.
                raise
            kind = "dropped" if journal.keys_sent else "refused"
            return self._settling.end(journal, kind, str(error), wait, _why(error))
        except BaseException as error:
            # From the owner's functions, or Ctrl-C. A round without keys stays open, and may be taken up again; so does
            # one over neighbours.
            if journal.keys_sent and not journal.entry.resumes:
                self._settling.end(journal, "dropped", f"interrupted by {type(error).__name__}", wait, tell=False)
            raise
        return self._settling.conclude(journal, ended, wait)

    def _pause(self, reason: str) -> Outcome:
        self._device.emit("paused", {"reason": reason})
        return Outcome("paused", self._device.config.pause_seconds, self._plan.round_id, reason)

    def _carry_out(self, journal: OpenRound) -> Ended:
        device, plan = self._device, self._plan
        if (plan.levels > 0) != (device.site is not None):
            here = "this is a device" if device.site is None else "this is an edge server"
            raise PolicyError(f"plan {plan.round_id}: with {plan.levels} levels of edge servers, and {here}")
        revoked = self._revoked()
        prepared = prepare(plan, self._record, device.cache, device.origins, self._session, self._limits)
        journal.advance("assigned", model=prepared.bundle.manifest.name)
        origin = check_origin(plan, prepared.bundle.manifest, self._record.root)
        if origin is not None:
            journal.take_origin(origin)
        if device.site is not None:
            return self._carry_sum(journal, prepared, device.site, revoked)
        if plan.kind != "training":
            # Before the work, which a refusal would waste; `add` checks again when the devices in the sum are known.
            device.queries.check(plan, prepared.bundle.manifest.privacy, self._record.server_key)
        name = state_name(prepared.bundle)
        state = device.state(name)
        device.gate.pass_or_wait()
        done = self._contribute(prepared, state, journal)
        # As bytes, for the journal: the file of the present state stays as it is until the round is known to count.
        new_state = state.encode() if plan.kind == "training" and (state.personal or state.state) else b""
        layout, policy = prepared.layout, prepared.bundle.manifest.privacy
        # Free the model and its training state: the round may wait for other devices for minutes.
        del prepared, state

        def on_counted(devices: Sequence[str]) -> None:
            # Raises, before the confirmation is sent, if this sum and an earlier one would single devices out.
            if plan.kind != "training" and plan.privacy == "secure":
                device.queries.add(plan, policy, devices, self._record.server_key)
            journal.store_state(new_state, name, len(devices))

        owner = self._owner()
        if plan.privacy == "plain":
            update = encode_plain(layout, done.arrays)
            # Before the upload: the server sees a plain answer even if the round fails later.
            if plan.kind != "training":
                device.queries.add(plan, policy, [], self._record.server_key)
            return PlainRound(plan, self._session, journal, device.config, owner).run(update, on_counted)

        def encode_stale(staleness: int) -> Vector:
            arrays = discount_stale(done, layout, staleness, plan.staleness_exponent or 0.0)
            return layout.encode(arrays, modulus_bits=plan.modulus_bits, max_cohort=plan.max_cohort)

        # Encode before keys are sent: a device that fails here has not joined the cohort yet.
        fresh = encode_stale(0)

        def vector(staleness: int) -> Vector:
            return encode_stale(staleness) if staleness else fresh

        given = self._given(revoked)
        if over_neighbours(plan.protocol):
            journal.keep(encode(self._sealed), fresh, new_state, name)
            terms = terms_of(plan, self._digest, policy)
            return NeighbourRound(plan, self._session, journal, device.config, owner).run(
                neighbours.Participant(terms, *given), terms.assumed.server, layout, vector
            )
        return SecureRound(plan, self._session, journal, device.config, owner).run(
            Participant(plan, self._digest, *given), layout, vector, on_counted
        )

    def _carry_sum(self, journal: OpenRound, prepared: Prepared, site: Site, revoked: Revoked) -> Ended:
        """The round of an edge server, which sends the sum of its own devices; always over a complete graph."""
        device, plan = self._device, self._plan
        given = SiteRound(
            plan, self._sealed, prepared.bundle, self._record.of_log(prepared.bundle.manifest), device.cache,
            self._session, device.gate.pass_or_wait,
        )  # fmt: skip
        layout, policy, server = prepared.layout, prepared.bundle.manifest.privacy, self._record.server_key
        del prepared
        if plan.kind != "training":
            device.queries.check(plan, policy, server)
        vector, devices = site.collect(given)
        journal.advance("assigned", examples=devices)

        def on_counted(members: Sequence[str]) -> None:
            # Else the difference of two sums would be that of few sites, where the policy wants more in a sum.
            if plan.kind != "training":
                least = policy_of_members(policy, plan.levels).min_cohort
                device.queries.add(plan, policy, members, server, minimum=least)
            journal.store_state(b"", "", len(members))

        return SecureRound(plan, self._session, journal, device.config, self._owner()).run(
            Participant(plan, self._digest, *self._given(revoked)), layout, lambda staleness: vector, on_counted
        )

    def _go_on(self, journal: OpenRound) -> Ended:
        device, plan, kept = self._device, self._plan, journal.kept
        revoked = self._revoked()
        bundle, layout = prepare_bundle(plan, self._record, device.cache, self._session, self._limits)
        self._limits.check_examples(plan, bundle.manifest, journal.entry.examples)
        device.gate.pass_or_wait()
        terms = terms_of(plan, self._digest, bundle.manifest.privacy)
        participant = self._wake(journal, terms, revoked)
        return NeighbourRound(plan, self._session, journal, device.config, self._owner()).run(
            participant, terms.assumed.server, layout, lambda staleness: kept.vector(layout.length), resumed=True
        )

    def _wake(self, journal: OpenRound, terms: Terms, revoked: Revoked) -> neighbours.Participant:
        """The participant as it was stored last. Raises LostError."""
        try:
            kept = journal.kept.secrets()
            participant = neighbours.Participant.resume(kept.participant, terms, *self._given(revoked))
        except (ClientError, MessageError, ConsistencyError) as error:
            raise LostError(str(error)) from None
        if journal.entry.masked is not None and journal.entry.masked != kept.masked:
            raise LostError("the stored secrets are older than the masked bytes")
        return participant

    def _given(self, revoked: Revoked) -> tuple[Any, ...]:
        """What a participant is given besides the plan's terms."""
        record = self._record
        return self._device.identity.key(), record.chain, record.enrolment_key, secrets.token_bytes, revoked

    def _owner(self) -> Owner:
        device = self._device

        def pause(seconds: float) -> None:
            device.gate.pause(self._transport.jittered(seconds))

        return Owner(pause, device.gate.pass_or_wait, device.emit)

    def _revoked(self) -> Revoked:
        """The devices and tokens that must not be in the cohort; nobody in plain rounds, which have no peers."""
        if self._plan.privacy == "plain":
            return NOBODY
        record = self._record
        path = self._device.config.folder / "rounds" / "revoked"
        return RevocationBook(path, record.server_key, record.population).fetch_named(
            self._plan.revocations, self._session
        )

    def _contribute(self, prepared: Prepared, state: DeviceState, journal: OpenRound) -> Contribution:
        started = time.monotonic()
        fields = self._device.examples()
        count = max((len(array) for array in fields.values()), default=0)
        # The limit on epsilon needs the number of examples, and nothing may be computed before it is checked.
        self._limits.check_examples(self._plan, prepared.bundle.manifest, count)
        done = contribute(
            prepared,
            self._plan,
            seed=self._device.seeds.derive(self._digest),
            fields=fields,
            state=state,
            publisher_keys=self._record.publisher_keys,
            config=self._device.config,
            check=self._device.gate.pass_or_wait,
            decisions=self._device.decisions,
            starter=self._device.starter,
        )
        manifest, plan = prepared.bundle.manifest, self._plan
        noise, rho = noise_in_round(plan, manifest, done.examples)
        # In the journal before any key is sent: the owner's totals include a round even if its end is never known.
        journal.advance("assigned", examples=done.examples, steps=done.steps, noise=noise, rho=rho)
        detail = {"examples": done.examples, "steps": done.steps, "seconds": time.monotonic() - started}
        self._device.emit("trained", {**detail, **({} if done.loss is None else {"loss": done.loss})})
        return done


def _why(error: Exception) -> LeaveReason:
    """What the server may be told: the kind of limit or error, and never its text, which may tell of the examples.

    That examples do not fit the bundle, or that training on them diverges, tells no more than that the device leaves.
    """
    if isinstance(error, OwnerRefusalError):
        return cast(LeaveReason, error.code)
    if isinstance(error, SignatureError):
        return "publisher"
    if isinstance(error, PolicyError):
        return "policy"
    if isinstance(error, RuntimeLimitError | TooLargeError):
        return "size"
    if isinstance(error, RuntimeInputError | IndexRangeError):
        return "data"
    if isinstance(error, NonFiniteLossError):
        return "diverged"
    return "bundle" if isinstance(error, BundleError) else "other"
