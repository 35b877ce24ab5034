"""The device agent: one loop that checks in, takes part in rounds, and adopts the versions that the server offers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Self

from archipel.client.conditions.gate import Gate, MayWork
from archipel.client.conditions.owner_limits import check_population, with_allowed_publishers
from archipel.client.config import AgentConfig
from archipel.client.connection.enrolment import is_here, join
from archipel.client.connection.identity import DeviceRecord
from archipel.client.connection.rotation import rotate
from archipel.client.connection.session import DeviceSession
from archipel.client.connection.transport import Transport
from archipel.client.connection.waiting import Waiting
from archipel.client.device import Examples, Site
from archipel.client.events import Event, EventName, OnEvent, Outcome, traced
from archipel.client.memory.entry import Entry
from archipel.client.memory.folder import lock_folder
from archipel.client.memory.journal import OpenRound
from archipel.client.memory.keystore import KeyStore
from archipel.client.memory.plan_book import why_expired
from archipel.client.opening import open_folder
from archipel.client.rounds.exchange import LATER
from archipel.client.rounds.participation import Participation
from archipel.client.rounds.resuming import find_interrupted
from archipel.client.rounds.settling import Settling
from archipel.client.versions.adoption import Adoption
from archipel.errors import (
    CertificateError,
    ClientError,
    MessageError,
    OwnerRefusalError,
    RefusedError,
    RoundAbandonedError,
    SessionRefusedError,
    UnreachableError,
)
from archipel.lite_runtime import Slots
from archipel.protocol.backoff import Backoff
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.messages import CheckIn, RoundPlan, SetAside
from archipel.protocol.moments import moment
from archipel.protocol.sealed import Sealed, unseal
from archipel.protocol.secagg_plus.choosing import spoken

_SHORTEST_WAIT = 0.01
_LONGEST_WAIT = 86400.0


class Agent:
    """One device. The agent locks the device's folder until `close`, and one thread at a time may use it.

    Arguments:
        config: the owner's settings, among them the device's folder.
        examples: returns the local data, `{field: array [examples, ...]}`. The agent calls it when a round needs the
            data, which never leaves this device.
        on_event: called with an Event for everything that happens.
        conditions: says whether the device may work now: True or "" for yes, False or a reason for no. The agent calls
            it before work, between training steps and between messages. None: the device may always work.
        keys: keeps the device's secrets. None: files in its folder, which only the owner can read.
        site: of an edge server, which has no examples.

    What one of the three functions raises passes through; a round in which keys were sent is left first, unless it is
    one over neighbours, which goes on with the next `run_once`.

    Raises:
        ClientError: the folder cannot be used, another agent uses it, or a file in it is damaged.
        SignatureError: the device's key is damaged.
        MissingExtraError: the package of the engine in the settings is not installed.

    Example:
        with Agent(AgentConfig(folder=Path("device")), examples=lambda: {"x": x, "y": y}) as agent:
            agent.enrol(token)
            outcome = agent.run_once()
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        examples: Examples,
        on_event: OnEvent | None = None,
        conditions: MayWork | None = None,
        keys: KeyStore | None = None,
        site: Site | None = None,
    ) -> None:
        config.require_engine()
        self.config = config
        self._on_event = traced(config, on_event)
        self._gate = Gate(
            config.folder, conditions, self._emit, ask_again=config.pause_seconds, resume_within=config.resume_within
        )
        self._lock = lock_folder(config.folder)
        try:
            self._device = open_folder(
                config, keys, gate=self._gate, examples=examples, emit=self._emit, site=site
            )  # fmt: skip
            self._record = self._device.identity.record()
            self._adoption = Adoption(self._device)
        except BaseException:
            # There is no object whose `close` could release the lock.
            os.close(self._lock)
            raise
        self._transport: Transport | None = None
        self._session: DeviceSession | None = None
        self._round_id = ""
        self._set_aside: SetAside | None = None
        self._waiting = Waiting(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder, the connection and the models that `model` returned. A second call does nothing."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._adoption.close()
        self._device.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def device_id(self) -> str:
        """The device's id, 32 hexadecimal digits; empty before enrolment."""
        return "" if self._record is None else self._record.device_id

    @property
    def rounds(self) -> list[Entry]:
        """The journal: what this device did and sent in each round, the oldest first."""
        return self._device.journal.entries()

    @property
    def models(self) -> dict[str, int]:
        """The models that this device runs, by name, each with the number of the version that runs."""
        return self._adoption.versions()

    def model(self, name: str) -> Slots:
        """The slots of the model `name`, which predict with its running version, until `close`.

        When the agent adopts another version, the same object predicts with that one. Any thread may call this.

        Raises ClientError if the device is not enrolled, the agent was closed, or no version was adopted yet; SlotError
        if another process owns the model's slots.
        """
        if self._record is None or self._lock < 0:
            raise ClientError(f"{self.config.folder}: this device is not enrolled, or its agent was closed")
        return self._adoption.model(name, with_allowed_publishers(self._record, self.config))

    # --- enrolment ------------------------------------------------------------------------------------------------

    def enrol(self, token: EnrolmentToken) -> str:
        """Join the token's population and pin the keys in the token; returns the device's id.

        After a failure it may be called again with the same token; once the device is enrolled it does nothing. A
        device of an edge server moves so to another one below the same root, and back.

        Raises:
            CertificateError: the token contradicts itself.
            OwnerRefusalError: the owner does not allow the token's population.
            RefusedError: the token has expired, or another device used it.
            UnreachableError: no attempt brought an answer.
            ClientError: the device is enrolled elsewhere, or in a round and cannot move.
        """
        record, device = self._record, self._device
        if record is not None and is_here(record, token):
            return record.device_id
        reason = check_population(token.population, self.config)
        if reason:
            raise OwnerRefusalError("population", f"{self.config.folder}: {reason}")
        busy = bool(device.journal.unfinished())
        self._record = record = join(token, record, device.identity, self.config, self._gate.pause, busy=busy)
        if self._transport is not None:  # that of the edge server which it has left
            self._transport.close()
        self._transport = self._session = None
        self._emit("enrolled", {"population": record.population})
        return record.device_id

    def is_at(self, token: EnrolmentToken) -> bool:
        """Whether the device is enrolled where the token is for."""
        return self._record is not None and is_here(self._record, token)

    def rotate_key(self) -> bool:
        """Replace the device's key by a new one; the device's id stays.

        A kill at any point is safe, because the key that the server accepts is always on disk.

        Returns True if the server accepts the new key; False if it cannot replace the key now, such as during a round
        of this device. Then each `run_once` tries again.

        Raises CertificateError if the key was replaced as often as is allowed, ClientError before enrolment,
        UnreachableError, or RefusedError.
        """
        transport, _, record = self._connect()
        changed = rotate(transport, self._device.identity, record)
        if changed is None:
            return False
        self._record, self._session = changed, None
        self._emit("rotated", {"number": len(changed.chain.rotations)})
        return True

    # --- work -----------------------------------------------------------------------------------------------------

    def run_forever(self, stop: threading.Event | None = None) -> None:
        """Check in and take part in rounds until `stop` is set.

        The agent then leaves the round that it is in, unless it is one over neighbours, which goes on after a restart.

        If the server cannot be reached, the agent waits and tries again. Raises RefusedError if the server does not
        know this device, ClientError if the device is not enrolled or a file in its folder is damaged.
        """
        self._gate.stop = stop = threading.Event() if stop is None else stop
        failures = 0
        # Twice `backoff`: the transport has used waits of `backoff` already, in its own attempts.
        offline = Backoff(2 * self.config.backoff, longest=self.config.max_offline_wait, longest_asked=_LONGEST_WAIT)
        try:
            while not stop.is_set():
                try:
                    wait = self._check_in(patient=True).wait
                    failures = 0
                except (UnreachableError, RefusedError) as error:
                    # Any other refusal is final: the same request would be refused again.
                    if isinstance(error, RefusedError) and error.status not in LATER:
                        raise
                    failures += 1
                    asked = error.retry_after if isinstance(error, RefusedError) else None
                    wait = offline.after(failures, retry_after=asked)
                except RoundAbandonedError:
                    # `stop` was set while the agent waited for the server, whose answer may still come on the old one.
                    self._transport = None
                    continue
                stop.wait(self._connect()[0].jittered(wait) + self._adoption.remaining_silence())
        finally:
            # The caller's event stays set, and would end the round of a later `run_once`.
            self._gate.stop = threading.Event()

    def run_once(self) -> Outcome:
        """Check in once, and take part in a round if there is one.

        Returns:
            What the device did, and after how many seconds to call again. A round that fails is an outcome, and no
            exception.

        Raises:
            ClientError: the device is not enrolled, or a file in its folder is damaged.
            UnreachableError: no attempt to check in, or to fetch what the round needs, brought an answer.
            RefusedError: the server refused the check-in, or cannot serve now what the round needs.
        """
        outcome = self._check_in(patient=False)
        return replace(outcome, wait=outcome.wait + self._adoption.remaining_silence())

    def _check_in(self, *, patient: bool) -> Outcome:
        try:
            return self._run_once(patient)
        except SessionRefusedError:
            # The request for the next key may reach the server long after the agent gave up on an answer; the server
            # then refuses the old key. Sending the request again finds that out.
            if not self._device.identity.rotating or not self.rotate_key():
                raise
        return self._run_once(patient)

    def _run_once(self, patient: bool) -> Outcome:
        self._connect()
        self._reconcile()
        reason = self._gate.why_not()
        if reason:
            self._emit("paused", {"reason": reason})
            return Outcome("paused", self.config.pause_seconds, reason=reason)
        if self._device.identity.rotating:
            self.rotate_key()
        # Again: `rotate_key` replaces the record and ends the session.
        transport, session, record = self._connect()
        transport.traffic.take()
        # Before the check-in: a new round must not start from a state that an interrupted round may replace.
        interrupted = find_interrupted(self._device.journal, record.server_key)
        if interrupted is not None:
            return self._take_part(interrupted.plan, interrupted.sealed, self.config.pause_seconds, interrupted.journal)
        pending = Settling(self._device, transport, session).recover()
        if pending:
            self._emit("waiting", {"retry_after": self.config.pause_seconds}, pending)
            return Outcome("waiting", self.config.pause_seconds, pending, "the round's result is still to come")
        if self._device.site is not None:
            self._device.site.follow(session)
        attributes, versions = dict(self.config.attributes), self._adoption.fetched_versions()
        told = CheckIn(attributes=attributes, versions=versions, protocols=spoken(), adds_noise=True)
        answer = self._waiting.check_in(session, told, self._gate.stop if patient else None)
        wait = min(max(answer.retry_after, _SHORTEST_WAIT), _LONGEST_WAIT)
        try:
            plan = None if answer.plan is None else unseal("plan", answer.plan, record.server_key, RoundPlan)
        except (CertificateError, MessageError) as error:
            self._emit("refused", {"reason": str(error)})
            return Outcome("refused", wait, reason=str(error))
        # Rounds in which this device sent nothing and that the server does not assign again go on without it.
        for journal in self._device.journal.unfinished():
            if not journal.keys_sent and (plan is None or journal.entry.round_id != plan.round_id):
                journal.close("dropped", "interrupted before keys were sent; the round went on without this device")
        if plan is None or answer.plan is None or self._has_been_in(plan):
            self._adoption.consider(answer.offers, session, with_allowed_publishers(record, self.config))
            if answer.set_aside is not None and answer.set_aside != self._set_aside:
                self._emit("set_aside", {"until": moment(answer.set_aside.until), "reason": answer.set_aside.reason})
            self._set_aside = answer.set_aside
            self._emit("waiting", self._until_next(wait))
            return Outcome("waiting", wait, reason="" if self._set_aside is None else self._set_aside.reason)
        why = why_expired(plan, time.time(), transport.server_time()) or self._device.journal.why_old(plan)
        if why:
            # Not entered in the journal: old plans that are sent again must not push other rounds out of it.
            reason = f"the plan of round {plan.round_id} is an old one: {why}"
            Settling(self._device, transport, session).leave(plan.round_id, "other")
            self._emit("refused", {"reason": reason}, plan.round_id)
            return Outcome("refused", wait, plan.round_id, reason)
        outcome = self._take_part(plan, answer.plan, wait)
        if outcome.kind != "paused" and not self._gate.stop.is_set():
            # The round is over, so its outcome is returned whatever happens here: the next check-in offers the versions
            # again.
            with suppress(UnreachableError, RefusedError):
                self._adoption.consider(answer.offers, session, with_allowed_publishers(record, self.config))
        return outcome

    def _until_next(self, wait: float) -> dict[str, str | float]:
        """In how many seconds the agent comes again, for its owner: also where it is silent because of a version."""
        silence = self._adoption.remaining_silence()
        if silence <= 0:
            return {"retry_after": wait}
        return {
            "retry_after": round(wait + silence, 1),
            "reason": "silent after it has looked at a version",
        }

    def _has_been_in(self, plan: RoundPlan) -> bool:
        """Whether this device has sent something in the round already; it must not take part in it again."""
        before = self._device.journal.get(plan.round_id)
        return before is not None and before.step != "assigned"

    def _take_part(self, plan: RoundPlan, sealed: Sealed, wait: float, begun: OpenRound | None = None) -> Outcome:
        self._round_id = plan.round_id
        try:
            transport, session, record = self._connect()
            mine = with_allowed_publishers(record, self.config)
            part = Participation(self._device, transport, session, mine, plan, sealed)
            return part.run(wait) if begun is None else part.resume(begun, wait)
        finally:
            self._round_id = ""
            self._reconcile()

    def _reconcile(self) -> None:
        if (site := self._device.site) is not None:
            site.reconcile(self._device.journal)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _connect(self) -> tuple[Transport, DeviceSession, DeviceRecord]:
        record = self._record
        if record is None:
            raise ClientError(f"{self.config.folder}: this device is not enrolled; call enrol with its token first")
        if self._lock < 0:
            raise ClientError(f"{self.config.folder}: this agent was closed")
        if self._transport is None:
            self._transport = Transport(self.config.server or record.server, self.config, self._gate.pause)
            self._session = None
        if self._session is None:
            self._session = DeviceSession(self._transport, record, self._device.identity.key())
        return self._transport, self._session, record

    def _emit(self, name: EventName, detail: Mapping[str, str | float], round_id: str = "") -> None:
        if self._on_event is not None:
            traffic = None if self._transport is None else self._transport.traffic
            sent, received = (0, 0) if traffic is None else (traffic.sent, traffic.received)
            self._on_event(Event(name, self.device_id, round_id or self._round_id, sent, received, dict(detail)))
