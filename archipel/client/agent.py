"""The device agent: one loop that checks in, trains, takes part in secure rounds and keeps what is the device's own."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, Self

import numpy as np

from archipel.client.cache import Cache
from archipel.client.config import AgentConfig
from archipel.client.events import Event, EventName, OnEvent, Outcome
from archipel.client.exchange import Ended, Owner, send_update
from archipel.client.folder import lock_folder
from archipel.client.identity import DeviceRecord, IdentityStore
from archipel.client.journal import Entry, Journal, OpenRound
from archipel.client.plain_round import PlainRound
from archipel.client.rotation import rotate
from archipel.client.round import SecureRound
from archipel.client.session import DeviceSession
from archipel.client.transport import Transport
from archipel.client.work import Contribution, Prepared, contribute, prepare, round_seed, stale, state_path
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
from archipel.lite_runtime.durable import sweep, write_durably
from archipel.protocol.identity import EnrolmentToken, enrolment_request
from archipel.protocol.messages import CheckIn, CheckInResponse, EnrolmentResponse, RoundPlan, RoundStatus
from archipel.protocol.plain import encode_plain
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import Sealed, encode, unseal
from archipel.protocol.secagg import Participant
from archipel.protocol.vector import Vector

Examples = Callable[[], Mapping[str, np.ndarray]]
"""The local data: arrays by field name, the first axis is the example."""

_REFUSALS = (
    BundleError, PolicyError, RuntimeLimitError, RuntimeProgramError, RuntimeInputError, CertificateError, MessageError,
)  # fmt: skip
_LEAVING = (RoundAbandonedError, NonFiniteLossError, ProtocolError)
_SHORTEST_WAIT = 0.01
_LONGEST_WAIT = 86400.0
_LATER = {429, 500, 502, 503, 504}


class Agent:
    """One device. Holds its folder for itself until `close`, and is used by one thread at a time.

    `examples` is called when a round needs the local data, which never leaves this process. `conditions` says whether
    the device may work now; it is asked before work, between training steps and between messages. `on_event` is told
    what happens. What the three raise is passed on, after the round was left.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        examples: Examples,
        on_event: OnEvent | None = None,
        conditions: Callable[[], bool] | None = None,
    ) -> None:
        """Raises ClientError when the folder cannot be used or another agent uses it."""
        self.config = config
        self._examples = examples
        self._on_event = on_event
        self._conditions = conditions
        self._stop = threading.Event()
        self._lock = lock_folder(config.folder)
        try:
            self._state_folder = config.folder / "state"
            self._state_folder.mkdir(exist_ok=True)
            for folder in (config.folder, self._state_folder):
                sweep(folder)
            self._identity = IdentityStore(config.folder)
            self._journal = Journal(config.folder / "rounds")
            self._cache = Cache(config.folder / "cache", config.max_cache_bytes)
            self._record = self._identity.record()
        except BaseException:
            os.close(self._lock)
            raise
        self._transport: Transport | None = None
        self._session: DeviceSession | None = None
        self._round_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder and the connection."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def device_id(self) -> str:
        """Empty before enrolment."""
        return "" if self._record is None else self._record.device_id

    @property
    def rounds(self) -> list[Entry]:
        """What this device did and sent, the oldest round first."""
        return self._journal.entries()

    # --- enrolment ------------------------------------------------------------------------------------------------

    def enrol(self, token: EnrolmentToken) -> str:
        """Join the token's population and pin its keys; returns the device id. May be called again after a failure.

        Raises CertificateError (the token contradicts itself), RefusedError (expired, used by another device),
        UnreachableError, or ClientError (enrolled elsewhere already).
        """
        record = self._record
        if record is not None:
            if (record.server_key, record.population) == (token.server_key, token.population):
                return record.device_id
            raise ClientError(
                f"{self.config.folder}: enrolled already, in population {record.population!r} at {record.server}; "
                "use another folder"
            )
        server = self.config.server or token.server
        request = enrolment_request(token, self._identity.key())
        transport = Transport(server, self.config, self._pause)
        try:
            answer = transport.call("POST", "/v1/devices", EnrolmentResponse, body=encode(request))
        finally:
            transport.close()
        record = self._identity.enrolled(token, request.chain, server)
        if answer.device_id != record.device_id:
            raise ClientError(f"enrolment: the server calls this device {answer.device_id}, it is {record.device_id}")
        self._record = record
        self._emit("enrolled", {"population": record.population})
        return record.device_id

    def rotate_key(self) -> bool:
        """Replace the device's key by a new one; the device id stays. True once the server answers to the new key,
        False where it cannot do that now (the device is in a round): then `run_once` goes on with it.

        May be interrupted anywhere: the key that the server answers to is on disk. Raises CertificateError when the key
        was replaced as often as it can be, ClientError before enrolment, UnreachableError, or RefusedError.
        """
        transport, _, record = self._connected()
        changed = rotate(transport, self._identity, record)
        if changed is None:
            return False
        self._record, self._session = changed, None
        self._emit("rotated", {"number": len(changed.chain.rotations)})
        return True

    # --- work -----------------------------------------------------------------------------------------------------

    def run_forever(self, stop: threading.Event) -> None:
        """Check in and take part until `stop` is set; then leave a round that is under way.

        A server that cannot be reached is waited out. Raises RefusedError when it does not know this device, and
        ClientError when the folder is damaged.
        """
        self._stop = stop
        failures = 0
        try:
            while not stop.is_set():
                try:
                    wait = self.run_once().wait
                    failures = 0
                except (UnreachableError, RefusedError) as error:
                    if isinstance(error, RefusedError) and error.status not in {401, *_LATER}:
                        raise
                    failures += 1
                    asked = error.retry_after if isinstance(error, RefusedError) else None
                    growing = min(self.config.backoff * 2 ** min(failures, 20), self.config.max_wait)
                    wait = growing if asked is None else min(asked, _LONGEST_WAIT)
                except RoundAbandonedError:
                    # Stopped while it waited for the server.
                    continue
                stop.wait(self._connected()[0].jittered(wait))
        finally:
            self._stop = threading.Event()

    def run_once(self) -> Outcome:
        """Check in once, and take part in a round if there is one. Raises ClientError before enrolment.

        Raises UnreachableError and RefusedError when the server cannot be asked for work; after that, failures are
        outcomes.
        """
        self._connected()
        if not self._may_work():
            self._emit("paused", {})
            return Outcome("paused", self.config.pause_seconds)
        if self._identity.rotating:
            self.rotate_key()
        transport, session, record = self._connected()
        transport.traffic.take()
        self._recover(session)
        body = encode(CheckIn(attributes=dict(self.config.attributes)))
        answer = session.call("POST", "/v1/check-ins", CheckInResponse, body=body)
        wait = min(max(answer.retry_after, _SHORTEST_WAIT), _LONGEST_WAIT)
        try:
            plan = None if answer.plan is None else unseal("plan", answer.plan, record.server_key, RoundPlan)
        except (CertificateError, MessageError) as error:
            self._emit("refused", {"reason": str(error)})
            return Outcome("refused", wait, reason=str(error))
        for journal in self._journal.unfinished():
            if not journal.keys_sent and (plan is None or journal.entry.round_id != plan.round_id):
                journal.close("dropped", "interrupted before keys were sent; the round went on without this device")
        before = None if plan is None else self._journal.get(plan.round_id)
        if plan is None or answer.plan is None or (before is not None and before.step != "assigned"):
            self._emit("waiting", {"retry_after": wait})
            return Outcome("waiting", wait)
        self._round_id = plan.round_id
        try:
            return self._take_part(plan, answer.plan, wait)
        finally:
            self._round_id = ""

    # --- one round ------------------------------------------------------------------------------------------------

    def _take_part(self, plan: RoundPlan, sealed: Sealed, wait: float) -> Outcome:
        digest = plan_digest(sealed)
        journal = self._journal.begin(
            round_id=plan.round_id,
            task_id=plan.task_id,
            number=plan.number,
            plan=digest,
            bundle=plan.bundle,
            buffered=plan.buffered,
        )
        self._emit("assigned", {"number": plan.number})
        try:
            ended = self._carry_out(plan, digest, journal)
        except _REFUSALS as error:
            # Once keys are sent the same errors are about peers and server: the device leaves.
            return self._end(journal, "dropped" if journal.keys_sent else "refused", str(error), wait)
        except _LEAVING as error:
            left = isinstance(error, RoundAbandonedError)
            if left and journal.counted:
                outcome = self._settle(journal, wait)
                if outcome is not None:
                    return outcome
            elif journal.keys_sent or not left:
                return self._end(journal, "dropped", str(error), wait)
            # Before keys are sent the round may be taken up again; after it counted, its result is still to be learnt.
            self._emit("paused", {"reason": str(error)})
            return Outcome("paused", self.config.pause_seconds, plan.round_id, str(error))
        except ClientError as error:
            if isinstance(error, UnreachableError) or (isinstance(error, RefusedError) and error.status in _LATER):
                # Only while fetching; RoundExchange makes RoundAbandonedError of these.
                raise
            return self._end(journal, "dropped" if journal.keys_sent else "refused", str(error), wait)
        except BaseException as error:
            if journal.keys_sent:
                self._end(journal, "dropped", f"interrupted by {type(error).__name__}", wait)
            raise
        return self._conclude(journal, ended, wait)

    def _carry_out(self, plan: RoundPlan, digest: str, journal: OpenRound) -> Ended:
        """Everything from the plan to the round's end."""
        transport, session, record = self._connected()
        prepared = prepare(plan, record, self._cache, session, self.config)
        path = state_path(self._state_folder, prepared.bundle)
        state = DeviceState.load(path)
        self._check()
        done = self._contribute(plan, digest, prepared, state, journal)
        new_state = state.encode() if plan.kind == "training" and (state.personal or state.state) else b""
        layout = prepared.layout
        del prepared, state

        def on_counted() -> None:
            journal.store_state(new_state, path.name)

        owner = Owner(lambda seconds: self._pause(transport.jittered(seconds)), self._check, self._emit)
        if plan.privacy == "plain":
            update = encode_plain(layout, done.arrays)
            return PlainRound(plan, session, journal, self.config, owner).run(update, on_counted)
        participant = Participant(
            plan, digest, self._identity.key(), record.chain, record.enrolment_key, secrets.token_bytes
        )

        def encode_stale(staleness: int) -> Vector:
            arrays = stale(done, layout, staleness, plan.staleness_exponent or 0.0)
            return layout.encode(arrays, modulus_bits=plan.modulus_bits, max_cohort=plan.max_cohort)

        # Before keys are sent: an update that cannot be encoded costs the others nothing.
        fresh = encode_stale(0)

        def vector(staleness: int) -> Vector:
            return encode_stale(staleness) if staleness else fresh

        return SecureRound(plan, session, journal, self.config, owner, participant).run(vector, on_counted)

    def _contribute(
        self, plan: RoundPlan, digest: str, prepared: Prepared, state: DeviceState, journal: OpenRound
    ) -> Contribution:
        started = time.monotonic()
        done = contribute(
            prepared,
            plan,
            seed=round_seed(digest, self.device_id),
            fields=self._examples(),
            state=state,
            config=self.config,
            check=self._check,
        )
        journal.advance("assigned", examples=done.examples)
        detail = {"examples": done.examples, "steps": done.steps, "seconds": time.monotonic() - started}
        self._emit("trained", {**detail, **({} if done.loss is None else {"loss": done.loss})})
        return done

    def _end(
        self, journal: OpenRound, kind: Literal["took_part", "dropped", "refused"], reason: str, wait: float
    ) -> Outcome:
        sent, received = self._bytes()
        journal.close(kind, reason, sent=sent, received=received)
        if kind != "took_part":
            self._emit(kind, {"reason": reason})
        entry = journal.entry
        return Outcome(kind, wait, entry.round_id, reason, entry.examples, sent, received)

    def _conclude(self, journal: OpenRound, ended: Ended, wait: float) -> Outcome:
        if not ended.counted:
            return self._end(journal, "dropped", f"the round failed: {ended.reason}", wait)
        new_state = journal.state()
        if new_state is not None:
            # Not before: what the device remembers must agree with what was counted.
            write_durably(self._state_folder / journal.entry.state, new_state)
        self._emit("committed", {}, journal.entry.round_id)
        return self._end(journal, "took_part", "", wait)

    def _settle(self, journal: OpenRound, wait: float) -> Outcome | None:
        """Ask what became of a round in which this device's update counted; None if that is not known yet."""
        if journal.entry.buffered:
            return self._conclude(journal, Ended(True), wait)
        _, session, _ = self._connected()
        try:
            status = session.call("GET", f"/v1/rounds/{journal.entry.round_id}", RoundStatus)
        except RefusedError as error:
            return None if error.status in _LATER else self._end(journal, "dropped", str(error), wait)
        except (UnreachableError, RoundAbandonedError):
            return None
        if status.phase not in ("committed", "failed"):
            return None
        return self._conclude(journal, Ended(status.phase == "committed", status.reason), wait)

    def _recover(self, session: DeviceSession) -> None:
        """See to rounds that were interrupted after keys were sent; their secrets are gone with the process."""
        for journal in self._journal.unfinished():
            if journal.counted:
                self._settle(journal, 0.0)
            elif journal.keys_sent:
                self._abandon(session, journal)

    def _abandon(self, session: DeviceSession, journal: OpenRound) -> None:
        reason = "the agent was restarted in the round"
        stored = journal.masked()
        if stored is not None:
            # These very bytes, and no others, may still become part of the sum: the peers' shares unmask them.
            try:
                send_update(session, journal.entry.round_id, *stored)
                reason += "; the stored update was sent"
            except RefusedError as error:
                if error.status in _LATER:
                    raise
                reason += f"; the stored update was not taken ({error})"
        journal.close("dropped", reason)
        self._emit("dropped", {"reason": reason}, journal.entry.round_id)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _connected(self) -> tuple[Transport, DeviceSession, DeviceRecord]:
        record = self._record
        if record is None:
            raise ClientError(f"{self.config.folder}: this device is not enrolled; call enrol with its token first")
        if self._lock < 0:
            raise ClientError(f"{self.config.folder}: this agent was closed")
        if self._transport is None:
            self._transport = Transport(self.config.server or record.server, self.config, self._pause)
            self._session = None
        if self._session is None:
            self._session = DeviceSession(self._transport, record, self._identity.key())
        return self._transport, self._session, record

    def _may_work(self) -> bool:
        return self._conditions is None or bool(self._conditions())

    def _check(self) -> None:
        if self._stop.is_set():
            raise RoundAbandonedError("the agent was stopped")
        if not self._may_work():
            raise RoundAbandonedError("the conditions for work no longer hold")

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise RoundAbandonedError("the agent was stopped")

    def _bytes(self) -> tuple[int, int]:
        if self._transport is None:
            return 0, 0
        return self._transport.traffic.sent, self._transport.traffic.received

    def _emit(self, name: EventName, detail: Mapping[str, str | float], round_id: str = "") -> None:
        if self._on_event is not None:
            sent, received = self._bytes()
            self._on_event(Event(name, self.device_id, round_id or self._round_id, sent, received, dict(detail)))
