"""A server that plays every part of the protocol for one device, with real peers, and answers as it is told.

Each request is a step of the protocol by name (see STEPS). What `changes[step]` has is done instead of the answer, one
entry for each request of that step, None: nothing; then the answers are right again.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from archipel import bundle as b
from archipel.protocol import messages as m
from archipel.protocol.identity import EnrolmentToken, issue_identity, mint_token, verify_chain, verify_rotation
from archipel.protocol.policy import plan_digest
from archipel.protocol.problems import make_problem
from archipel.protocol.sealed import Sealed, decode, encode, public_bytes, seal
from archipel.protocol.secagg import KeyTree, Participant, hand_out_keys, merge_complaints
from tests.support.in_thread import in_thread
from tests.support.linear_bundle import POPULATION, W0, make_bundle

STEPS = {
    "POST /v1/devices": "enrol",
    "PUT /v1/devices/ID/key": "rotate",
    "POST /v1/challenges": "challenge",
    "POST /v1/sessions": "session",
    "POST /v1/check-ins": "check-in",
    "GET /v1/bundles/DIGEST": "bundle",
    "GET /v1/blobs/DIGEST": "weights",
    "GET /v1/bundles/DIGEST/pieces": "pieces",
    "GET /v1/blobs/DIGEST/pieces": "pieces",
    "GET /v1/blobs/REVOKED": "revocations",
    "GET /v1/populations/NAME/weights-log/DIGEST": "log",
    "GET /v1/populations/NAME/weights-log/DIGEST/2/endorsement": "endorsement",
    "GET /v1/rounds/ID": "status",
    "POST /v1/rounds/ID/leave": "leave",
    "PUT /v1/rounds/ID/advertisement": "advertisement",
    "GET /v1/rounds/ID/cohort": "cohort",
    "PUT /v1/rounds/ID/shares": "shares",
    "GET /v1/rounds/ID/shares": "inbox",
    "PUT /v1/rounds/ID/complaints": "complaints",
    "GET /v1/rounds/ID/complaints": "all-complaints",
    "PUT /v1/rounds/ID/update": "update",
    "GET /v1/rounds/ID/update/parts": "parts",
    "PUT /v1/rounds/ID/update/parts/1": "part",
    "GET /v1/rounds/ID/survivors": "survivors",
    "PUT /v1/rounds/ID/confirmation": "confirmation",
    "GET /v1/rounds/ID/confirmations": "confirmations",
    "PUT /v1/rounds/ID/unmasking": "unmasking",
    "PUT /v1/rounds/ID/member": "member",
    "GET /v1/rounds/ID/invitation": "invitation",
    "POST /v1/rounds/ID/neighbours": "neighbours",
    "PUT /v1/rounds/ID/dealt": "dealt",
    "GET /v1/rounds/ID/inbox": "dealings",
    "PUT /v1/rounds/ID/refused": "refused",
    "GET /v1/rounds/ID/partners": "partners",
    "GET /v1/rounds/ID/question": "question",
    "PUT /v1/rounds/ID/inclusions": "included",
    "GET /v1/rounds/ID/inclusions": "inclusions",
    "PUT /v1/rounds/ID/answer": "answer",
}
TASK = "b" * 32
PHASE_AFTER: dict[str, m.Phase] = {
    "advertisement": "sharing", "shares": "complaining", "complaints": "masking", "update": "confirming",
    "confirmation": "unmasking", "unmasking": "committed",
}  # fmt: skip


@dataclass
class Reply:
    """One answer, before it is written."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def raw(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} X", f"Content-Length: {len(self.body)}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


Change = Callable[[Reply], Reply | bytes | None]
"""From the right answer to what is sent: another one, raw bytes, or None for silence and a closed connection."""


def refused(status: int, message: str = "no", **headers: str) -> Change:
    problem = make_problem(status, message, "1")
    return lambda reply: Reply(status, encode(problem), {k.replace("_", "-"): v for k, v in headers.items()})


def before(status: int, **headers: str) -> Change:
    """Refused, and the server has not taken the message."""
    change = refused(status, **headers)
    change.early = True  # type: ignore[attr-defined]
    return change


class Scripted(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key, self.enrolment_key, self.publisher = b.generate_key(), b.generate_key(), b.generate_key()
        file = make_bundle(folder / "bundle", self.publisher, modes=("secure", "plain"))
        weights = b.write_weights({"w": W0})
        self.bundle = b.open_bundle(file, [public_bytes(self.publisher)]).digest
        self.weights = hashlib.sha256(weights).hexdigest()
        self.files = {"bundle": file.read_bytes(), "weights": weights}
        self.changes: dict[str, list[Change | None]] = defaultdict(list)
        self.steps: list[str] = []
        """Every request so far, by its step."""
        self.bodies: dict[str, list[bytes]] = defaultdict(list)
        self.pieces = m.Pieces(size=0, pieces=[])
        self.log: list[Sealed] = []
        """Of the bundle's weights: empty as long as they are its own."""
        self.query = ""
        self.endorsement: m.Endorsement | None = None
        """Of the log's second entry."""
        self.revoked: str | None = None
        """The digest of the list that plans name."""
        self.offers: list[Sealed] = []
        self.chain: m.Chain | None = None
        self.plan: m.RoundPlan | None = None
        self.phase: m.Phase = "committed"
        self.accused = 0
        """How many devices its statuses say are accused; the list has none."""
        self.lock = threading.RLock()
        self.serials = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def token(self) -> EnrolmentToken:
        seed = secrets.token_bytes(32)
        return EnrolmentToken(
            server=self.url, server_key=public_bytes(self.key), enrolment_key=public_bytes(self.enrolment_key),
            publisher_keys=[public_bytes(self.publisher)], population=POPULATION, seed=seed,
            certificate=mint_token(self.enrolment_key, population=POPULATION, not_after=2**40, seed=seed),
        )  # fmt: skip

    def forget(self) -> None:
        """What was asked so far, and changes that were not made."""
        self.steps.clear()
        self.bodies.clear()
        self.changes.clear()

    def train(self, w: np.ndarray | bytes) -> None:
        """A plain round, which the log tells of, has made these weights, or the bytes of such, of the ones before."""
        self._step(w, round_id=secrets.token_hex(16), plan="e" * 64, privacy="plain", devices=3)

    def train_securely(self, w: np.ndarray) -> None:
        """The last round, a secure one that was committed, has made them: the first entry after the start."""
        assert self.plan is not None
        signed = {name: each for name, each in self.confirmed.items() if name in self.survived.devices}
        endorsers = [
            m.Endorser(chain=self._chains[name], signature=each.signature) for name, each in sorted(signed.items())
        ]
        self.endorsement = m.Endorsement(
            plan=self.sealed, survivors=self.survived, confirmation=signed[self._device].body, endorsers=endorsers
        )
        self._step(w, round_id=self.plan.round_id, plan=plan_digest(self.sealed), devices=len(self.survived.devices))

    def _step(self, w: np.ndarray | bytes, **values: Any) -> None:
        before, data = self.weights, w if isinstance(w, bytes) else b.write_weights({"w": w})
        self.weights, self.files["weights"] = hashlib.sha256(data).hexdigest(), data
        if not self.log:
            self._enter(kind="start", weights=before)
        self._enter(kind="step", weights=self.weights, parent=before, **values)

    def revoke(self, data: bytes) -> None:
        """The next plans name this list of revocations."""
        self.files["revocations"], self.revoked = data, hashlib.sha256(data).hexdigest()

    def _enter(self, **values: Any) -> None:
        previous = hashlib.sha256(self.log[-1].body).hexdigest() if self.log else "0" * 64
        entry = m.WeightsStatement(
            population=POPULATION, bundle=self.bundle, number=len(self.log) + 1, previous=previous, task_id=TASK,
            **values,
        )  # fmt: skip
        self.log.append(seal("weights", entry, self.key))

    def begin(self, **changes: Any) -> str:
        """The device's next check-in brings a plan. Returns the round's id."""
        values: dict[str, Any] = {
            "round_id": secrets.token_hex(16), "task_id": TASK, "number": 1, "bundle": self.bundle,
            "weights": self.weights, "privacy": "secure", "min_cohort": 3, "max_cohort": 4, "threshold": 3,
            "modulus_bits": 32, "serial": next(self.serials), "not_after": 2**40,
            "revocations": self.revoked, **changes,
        }  # fmt: skip
        self.plan = m.RoundPlan(**values)
        self.sealed = seal("plan", self.plan, self.key)
        self.phase = "advertising"
        if self.plan.privacy == "plain":
            self.phase = "buffering" if self.plan.buffered else "updating"
            return self.plan.round_id
        self.peers = {}
        self.advertised = {}
        for _ in range(2):
            key, token = b.generate_key(), self.token()
            chain = issue_identity(token.seed, token.certificate, public_bytes(key))
            digest = plan_digest(self.sealed)
            peer = Participant(self.plan, digest, key, chain, public_bytes(self.enrolment_key), secrets.token_bytes)
            self.peers[peer.device_id] = peer, chain
            self.advertised[peer.device_id] = peer.advertise()
        return self.plan.round_id

    # --- answers --------------------------------------------------------------------------------------------------

    def reply(self, method: str, path: str, body: bytes, headers: Message) -> Reply | bytes | None:
        step = step_of(method, path.replace(self.revoked, "REVOKED") if self.revoked else path)
        with self.lock:
            self.steps.append(step)
            self.bodies[step].append(body)
            self.query = path.partition("?")[2] or self.query
            change = self.changes[step].pop(0) if self.changes[step] else None
            if change is not None and getattr(change, "early", False):
                return change(Reply(200, b""))
            answer = self._right(step, body, headers)
            return answer if change is None else change(answer)

    def _right(self, step: str, body: bytes, headers: Message) -> Reply:
        if step in self.files:
            return self._file(self.files[step], headers.get("Range"))
        answer = getattr(self, "_" + step.replace("-", "_"), None)
        made = answer(body) if answer else make_problem(404, "no such thing", "1")
        return Reply(404 if isinstance(made, m.Problem) else 200, encode(made))

    @staticmethod
    def _file(data: bytes, wanted: str | None) -> Reply:
        if wanted is None:
            return Reply(200, data)
        start, _, last = wanted.removeprefix("bytes=").partition("-")
        first, stop = int(start), min(int(last or len(data)) + 1, len(data))
        if first >= len(data):
            return Reply(416, b"")
        return Reply(206, data[first:stop], {"Content-Range": f"bytes {first}-{stop - 1}/{len(data)}"})

    def _enrol(self, body: bytes) -> msgspec.Struct:
        self.chain = decode("enrolment", body, m.EnrolmentRequest).chain
        return m.EnrolmentResponse(device_id=self._device)

    def _rotate(self, body: bytes) -> msgspec.Struct:
        assert self.chain is not None
        request = decode("rotation", body, m.RotationRequest)
        self.chain, device = verify_rotation(
            request, self.chain, public_bytes(self.enrolment_key), public_bytes(self.key)
        )
        return m.RotationResponse(device_id=device.device_id, rotations=device.rotations)

    def _challenge(self, body: bytes) -> msgspec.Struct:
        return m.Challenge(nonce=secrets.token_bytes(32), expires=0.0)

    def _session(self, body: bytes) -> msgspec.Struct:
        return m.SessionResponse(token="t", expires=0.0)

    def _check_in(self, body: bytes) -> msgspec.Struct:
        over = self.plan is None or self.phase in ("committed", "failed")
        offers = [] if decode("check-in", body, m.CheckIn).versions is None else self.offers
        return m.CheckInResponse(plan=None if over else self.sealed, retry_after=0.01, offers=offers)

    def _pieces(self, body: bytes) -> msgspec.Struct:
        return self.pieces

    def _log(self, body: bytes) -> msgspec.Struct:
        return m.WeightsLog(entries=self.log[int(self.query.removeprefix("after=")) :], newest=len(self.log))

    def _status(self, body: bytes) -> msgspec.Struct:
        assert self.plan is not None
        return m.RoundStatus(
            round_id=self.plan.round_id, phase=self.phase, phase_ends=0.0, retry_after=0.01, complaints=self.accused
        )

    def _leave(self, body: bytes) -> msgspec.Struct:
        return m.Receipt()

    def _advertisement(self, body: bytes) -> msgspec.Struct:
        if self.phase == "advertising":
            assert self.chain is not None
            self.advertised[self._device] = decode("", body, m.AdvertiseRequest)
            self.shared = {name: peer.share(self._cohort_of(name)) for name, (peer, _) in self.peers.items()}
        return self._stored("advertisement")

    def _cohort(self, body: bytes) -> msgspec.Struct:
        return self._cohort_of(self._device)

    def _cohort_of(self, reader: str) -> m.Cohort:
        assert self.chain is not None
        assert self.plan is not None
        chains = self._chains
        trees = {name: KeyTree(sent.envelope_keys, self.plan.max_cohort) for name, sent in self.advertised.items()}
        members = [
            m.Member(chain=chains[name], advertisement=sent.advertisement) for name, sent in self.advertised.items()
        ]
        return m.Cohort(members=members, keys=hand_out_keys(trees, reader))

    def _shares(self, body: bytes) -> msgspec.Struct:
        if self.phase == "sharing":
            self.shared[self._device] = decode("", body, m.Shares)
            self.complained = [peer.complain(self._inbox_of(name)) for name, (peer, _) in self.peers.items()]
        return self._stored("shares")

    def _complaints(self, body: bytes) -> msgspec.Struct:
        if self.phase == "complaining":
            self.complained.append(decode("", body, m.Complaints))
            for peer, _ in self.peers.values():
                peer.mask(np.zeros(4, np.uint32), merge_complaints(self.complained))
        return self._stored("complaints")

    def _all_complaints(self, body: bytes) -> msgspec.Struct:
        return merge_complaints(self.complained)

    def _inbox(self, body: bytes) -> msgspec.Struct:
        return self._inbox_of(self._device)

    def _update(self, body: bytes) -> msgspec.Struct:
        if self.phase == "masking":
            self.survived = m.Survivors(devices=sorted(self.shared))
            self.confirmed = {name: peer.confirm(self.survived) for name, (peer, _) in self.peers.items()}
        if self.phase in ("updating", "buffering"):
            self.phase = "committed"
        return self._stored("update")

    def _parts(self, body: bytes) -> msgspec.Struct:
        return m.UpdateParts()

    def _part(self, body: bytes) -> msgspec.Struct:
        return m.Receipt()

    def _survivors(self, body: bytes) -> msgspec.Struct:
        return self.survived

    def _confirmation(self, body: bytes) -> msgspec.Struct:
        self.confirmed[self._device] = decode("", body, m.ConfirmRequest).confirmation
        return self._stored("confirmation")

    def _confirmations(self, body: bytes) -> msgspec.Struct:
        return m.Confirmations(
            confirmations=[m.Confirmed(device=name, confirmation=each) for name, each in self.confirmed.items()]
        )

    def _unmasking(self, body: bytes) -> msgspec.Struct:
        return self._stored("unmasking")

    def _stored(self, step: str) -> m.Receipt:
        order = list(PHASE_AFTER)
        if self.phase == "advertising" or self.phase == PHASE_AFTER[order[max(order.index(step) - 1, 0)]]:
            self.phase = PHASE_AFTER[step]
        return m.Receipt()

    def _inbox_of(self, recipient: str) -> m.Shares:
        found = [
            msgspec.structs.replace(share, peer=sender)
            for sender, shares in self.shared.items()
            for share in shares.shares
            if share.peer == recipient
        ]
        return m.Shares(shares=found)

    def _endorsement(self, body: bytes) -> msgspec.Struct:
        assert self.endorsement is not None
        return self.endorsement

    @property
    def _chains(self) -> dict[str, m.Chain]:
        assert self.chain is not None
        return {self._device: self.chain, **{name: chain for name, (_, chain) in self.peers.items()}}

    @property
    def _device(self) -> str:
        assert self.chain is not None
        return verify_chain(self.chain, public_bytes(self.enrolment_key)).device_id


def step_of(method: str, path: str) -> str:
    path = path.partition("?")[0].replace(f"/populations/{POPULATION}/", "/populations/NAME/")
    return STEPS[method + " " + re.sub("[0-9a-f]{32}", "ID", re.sub("[0-9a-f]{64}", "DIGEST", path))]


@contextmanager
def scripted(folder: Path) -> Iterator[Scripted]:
    with in_thread(Scripted(folder)) as server:
        yield server


def sealed_again(server: Scripted, change: Callable[[bytes], bytes]) -> Change:
    """A plan, and offers, whose bodies were changed before the server signed them."""

    def again(label: str, sealed: Sealed) -> Sealed:
        body = change(sealed.body)
        return Sealed(body=body, signature=server.key.sign(f"archipel/v1/{label}\0".encode() + body))

    def made(reply: Reply) -> Reply:
        answer = decode("", reply.body, m.CheckInResponse)
        plan = None if answer.plan is None else again("plan", answer.plan)
        offers = [again("offer", offer) for offer in answer.offers]
        return Reply(200, encode(msgspec.structs.replace(answer, plan=plan, offers=offers)))

    return made


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        reply = self.server.reply(self.command, self.path, body, self.headers)
        if reply is not None:
            self.wfile.write(reply if isinstance(reply, bytes) else reply.raw())
        self.close_connection = True

    do_GET = do_PUT = do_POST = _answer

    def log_message(self, *args: object) -> None:
        pass
