"""Devices that speak the protocol, each step of a round one call."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import generate_key, write_weights
from archipel.protocol import identity, messages
from archipel.protocol.narrow import pack_masked
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import Sealed, encode, public_bytes, seal, unseal
from archipel.protocol.secagg import Participant
from archipel.protocol.vector import Layout
from archipel.protocol.vector import pack as pack_vector
from tests.support.tiny_bundle import LENGTH, WEIGHT_STEP

START = 1_800_000_000.0
POPULATION = "pupils"
Answer = TypeVar("Answer")
Transport = Callable[[str, str, bytes | None, dict[str, str]], tuple[int, bytes]]


def nothing_learned() -> np.ndarray:
    """What a device sums up whose model did not move: deltas of 0, a weight of 1."""
    vector = np.zeros(LENGTH, np.uint32)
    vector[-1] = round(1 / WEIGHT_STEP)
    return vector


@dataclass(frozen=True)
class Keys:
    enrolment: Ed25519PrivateKey = field(default_factory=generate_key)
    publisher: Ed25519PrivateKey = field(default_factory=generate_key)


class Device:
    """One owner's device: enrols, opens a session, takes part in rounds. `vector` is what it sums up, uint32."""

    def __init__(self, transport: Transport, keys: Keys, server_key: bytes, *, not_after: float = START + 1e6) -> None:
        self.transport, self.keys, self.server_key = transport, keys, server_key
        seed = secrets.token_bytes(32)
        certificate = identity.mint_token(
            keys.enrolment, population=POPULATION, not_after=int(not_after), seed=seed, kind="device"
        )
        self.enrolment_token = identity.EnrolmentToken(
            server="http://unused",
            server_key=server_key,
            enrolment_key=public_bytes(keys.enrolment),
            publisher_keys=[public_bytes(keys.publisher)],
            population=POPULATION,
            seed=seed,
            certificate=certificate,
        )
        self.key = generate_key()
        self.id = identity.device_id(public_bytes(self.key))
        self.chain = identity.issue_identity(seed, certificate, public_bytes(self.key))
        self.token = ""
        self.plan: messages.RoundPlan | None = None
        self.participant: Participant
        """Of the secure round that it has joined."""
        self.vector = nothing_learned()
        self.layout: Layout | None = None
        """Of its vector, where entries have bits of their own."""
        self.masked = b""
        self.attributes: dict[str, str | float | bool] = {}
        self.versions: dict[str, int] | None = None
        self.protocols = messages.CheckIn().protocols
        self.adds_noise = True
        self.offers: list[messages.Offer] = []

    def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else encode(cast("msgspec.Struct", body))
        extra = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        status, answer = self.transport(method, path, data, {**extra, **(headers or {})})
        return status, msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else answer

    def ask(self, method: str, path: str, kind: type[Answer], body: object = None, **headers: str) -> Answer:
        status, answer = self.call(method, path, body, headers)
        assert status in (200, 201), (method, path, status, answer)
        return cast("Answer", answer) if isinstance(answer, bytes) else msgspec.convert(answer, kind)

    def ask_to_enrol(self) -> tuple[int, Any]:
        """The status and the body of the server's answer."""
        return self.call("POST", "/v1/devices", identity.enrolment_request(self.enrolment_token, self.key))

    def enrol(self) -> Device:
        request = identity.enrolment_request(self.enrolment_token, self.key)
        assert self.ask("POST", "/v1/devices", messages.EnrolmentResponse, request).device_id == self.id
        return self

    def open_session(self) -> Device:
        self.token = ""
        nonce = self.challenge().nonce
        self.token = self.ask("POST", "/v1/sessions", messages.SessionResponse, self.session_request(nonce)).token
        return self

    def challenge(self) -> messages.Challenge:
        return self.ask("POST", "/v1/challenges", messages.Challenge, messages.ChallengeRequest(device_id=self.id))

    def session_request(self, nonce: bytes) -> messages.SessionRequest:
        proof = seal("session", messages.SessionProof(nonce=nonce, server_key=self.server_key), self.key)
        return messages.SessionRequest(device_id=self.id, proof=proof)

    def check_in(self) -> Sealed | None:
        request = messages.CheckIn(
            attributes=self.attributes, versions=self.versions, protocols=self.protocols, adds_noise=self.adds_noise
        )
        answer = self.ask("POST", "/v1/check-ins", messages.CheckInResponse, request)
        self.offers = [unseal("offer", each, self.server_key, messages.Offer) for each in answer.offers]
        return answer.plan

    # The steps of a round, each one call on the API (or a read and a write).

    def join(self) -> bool:
        """Fetch the plan, if there is one."""
        sealed = self.check_in()
        if sealed is None:
            return False
        self.plan = unseal("plan", sealed, self.server_key, messages.RoundPlan)
        if self.plan.privacy == "plain":
            return True
        self.participant = Participant(
            self.plan, plan_digest(sealed), self.key, self.chain, public_bytes(self.keys.enrolment), secrets.token_bytes
        )
        return True

    @property
    def round(self) -> str:
        assert self.plan is not None
        return f"/v1/rounds/{self.plan.round_id}"

    def status(self) -> messages.RoundStatus:
        return self.ask("GET", self.round, messages.RoundStatus)

    def advertising(self) -> None:
        self.ask("PUT", f"{self.round}/advertisement", messages.Receipt, self.participant.advertise())

    def sharing(self) -> None:
        cohort = self.ask("GET", f"{self.round}/cohort", messages.Cohort)
        self.ask("PUT", f"{self.round}/shares", messages.Receipt, self.participant.share(cohort))

    def complaining(self) -> None:
        inbox = self.ask("GET", f"{self.round}/shares", messages.Shares)
        self.ask("PUT", f"{self.round}/complaints", messages.Receipt, self.participant.complain(inbox))

    def masking(self) -> None:
        complaints = self.ask("GET", f"{self.round}/complaints", messages.Complaints)
        assert self.plan is not None
        self.masked = self.pack(self.participant.mask(self.vector, complaints))
        self.upload(self.masked)

    def pack(self, masked: np.ndarray) -> bytes:
        assert self.plan is not None
        if self.layout is not None:
            return pack_masked(self.layout, masked, self.plan)
        return pack_vector(masked, self.plan.modulus_bits)

    def upload(self, data: bytes) -> None:
        headers = {"Digest-SHA256": hashlib.sha256(data).hexdigest(), "Content-Type": "application/octet-stream"}
        self.ask("PUT", f"{self.round}/update", messages.Receipt, data, **headers)

    def updating(self, **arrays: npt.ArrayLike) -> None:
        """Upload a plain update: arrays by output name."""
        self.upload(write_weights({name: np.asarray(array, np.float32) for name, array in arrays.items()}))

    def try_upload(self, data: bytes) -> tuple[int, Any]:
        headers = {"Digest-SHA256": hashlib.sha256(data).hexdigest(), "Content-Type": "application/octet-stream"}
        return self.call("PUT", f"{self.round}/update", data, headers)

    def confirming(self) -> None:
        survivors = self.ask("GET", f"{self.round}/survivors", messages.Survivors)
        request = messages.ConfirmRequest(confirmation=self.participant.confirm(survivors))
        self.ask("PUT", f"{self.round}/confirmation", messages.Receipt, request)

    def unmasking(self) -> None:
        confirmations = self.ask("GET", f"{self.round}/confirmations", messages.Confirmations)
        self.ask("PUT", f"{self.round}/unmasking", messages.Receipt, self.participant.unmask(confirmations))

    def answer(self, phase: str) -> None:
        getattr(self, phase)()


ANSWERED = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
