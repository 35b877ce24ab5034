"""One round of this device: from the plan to its end, whatever that is."""

from __future__ import annotations

import secrets
import time

from archipel.client.device import Device
from archipel.client.events import Outcome
from archipel.client.exchange import LATER, Ended, Owner
from archipel.client.identity import DeviceRecord
from archipel.client.journal import OpenRound
from archipel.client.plain_round import PlainRound
from archipel.client.privacy import noise_of
from archipel.client.round import SecureRound
from archipel.client.session import DeviceSession
from archipel.client.settling import Settling
from archipel.client.transport import Transport
from archipel.client.work import Contribution, Prepared, contribute, prepare, round_seed, stale, state_name
from archipel.errors import (
    BundleError,
    CertificateError,
    ClientError,
    MessageError,
    NonFiniteLossError,
    PolicyError,
    ProtocolError,
    RefusedError,
    RoundAbandonedError,
    RuntimeInputError,
    RuntimeLimitError,
    RuntimeProgramError,
    UnreachableError,
)
from archipel.lite_runtime import DeviceState
from archipel.protocol.messages import RoundPlan
from archipel.protocol.plain import encode_plain
from archipel.protocol.secagg import Participant
from archipel.protocol.vector import Vector

_REFUSALS = (
    BundleError, PolicyError, RuntimeLimitError, RuntimeProgramError, RuntimeInputError, CertificateError, MessageError,
)  # fmt: skip
_LEAVING = (RoundAbandonedError, NonFiniteLossError, ProtocolError)


class Participation:
    """`digest` is the plan's (protocol.policy.plan_digest)."""

    def __init__(
        self,
        device: Device,
        transport: Transport,
        session: DeviceSession,
        record: DeviceRecord,
        plan: RoundPlan,
        digest: str,
    ) -> None:
        self._device = device
        self._transport = transport
        self._session = session
        self._record = record
        self._plan = plan
        self._digest = digest
        self._settling = Settling(device, transport, session)

    def run(self, wait: float) -> Outcome:
        """Take part. `wait` is what the outcome says. Raises UnreachableError and RefusedError only while fetching."""
        journal = self._device.journal.begin(self._plan, self._digest)
        self._device.emit("assigned", {"number": self._plan.number})
        try:
            ended = self._carry_out(journal)
        except _REFUSALS as error:
            # Once keys are sent the same errors are about peers and server: the device leaves.
            return self._settling.end(journal, "dropped" if journal.keys_sent else "refused", str(error), wait)
        except _LEAVING as error:
            left = isinstance(error, RoundAbandonedError)
            if left and journal.counted:
                outcome = self._settling.settle(journal, wait)
                if outcome is not None:
                    return outcome
            elif journal.keys_sent or not left:
                return self._settling.end(journal, "dropped", str(error), wait)
            # Before keys are sent the round may be taken up again; after it counted, its result is still to be learnt.
            self._device.emit("paused", {"reason": str(error)})
            return Outcome("paused", self._device.config.pause_seconds, self._plan.round_id, str(error))
        except ClientError as error:
            if isinstance(error, UnreachableError) or (isinstance(error, RefusedError) and error.status in LATER):
                # Only while fetching; RoundExchange makes RoundAbandonedError of these.
                raise
            return self._settling.end(journal, "dropped" if journal.keys_sent else "refused", str(error), wait)
        except BaseException as error:
            if journal.keys_sent:
                self._settling.end(journal, "dropped", f"interrupted by {type(error).__name__}", wait)
            raise
        return self._settling.conclude(journal, ended, wait)

    def _carry_out(self, journal: OpenRound) -> Ended:
        device, plan = self._device, self._plan
        prepared = prepare(plan, self._record, device.cache, device.origins, self._session, device.config)
        journal.advance("assigned", model=prepared.bundle.manifest.name)
        name = state_name(prepared.bundle)
        state = device.state(name)
        device.gate.pass_or_wait()
        done = self._contribute(prepared, state, journal)
        new_state = state.encode() if plan.kind == "training" and (state.personal or state.state) else b""
        layout = prepared.layout
        del prepared, state

        def on_counted(cohort: int) -> None:
            journal.store_state(new_state, name, cohort)

        def pause(seconds: float) -> None:
            device.gate.pause(self._transport.jittered(seconds))

        owner = Owner(pause, device.gate.pass_or_wait, device.emit)
        if plan.privacy == "plain":
            update = encode_plain(layout, done.arrays)
            return PlainRound(plan, self._session, journal, device.config, owner).run(update, on_counted)
        participant = Participant(
            plan, self._digest, device.identity.key(), self._record.chain, self._record.enrolment_key,
            secrets.token_bytes,
        )  # fmt: skip

        def encode_stale(staleness: int) -> Vector:
            arrays = stale(done, layout, staleness, plan.staleness_exponent or 0.0)
            return layout.encode(arrays, modulus_bits=plan.modulus_bits, max_cohort=plan.max_cohort)

        # Before keys are sent: an update that cannot be encoded costs the others nothing.
        fresh = encode_stale(0)

        def vector(staleness: int) -> Vector:
            return encode_stale(staleness) if staleness else fresh

        return SecureRound(plan, self._session, journal, device.config, owner, participant).run(vector, on_counted)

    def _contribute(self, prepared: Prepared, state: DeviceState, journal: OpenRound) -> Contribution:
        started = time.monotonic()
        done = contribute(
            prepared,
            self._plan,
            seed=round_seed(self._digest, self._record.device_id),
            fields=self._device.examples(),
            state=state,
            publisher_keys=self._record.publisher_keys,
            config=self._device.config,
            check=self._device.gate.pass_or_wait,
        )
        manifest, plan = prepared.bundle.manifest, self._plan
        noise, rho = noise_of(manifest, plan.kind, plan.program, done.examples)
        journal.advance("assigned", examples=done.examples, steps=done.steps, noise=noise, rho=rho)
        detail = {"examples": done.examples, "steps": done.steps, "seconds": time.monotonic() - started}
        self._device.emit("trained", {**detail, **({} if done.loss is None else {"loss": done.loss})})
        return done
