"""Whatever a server answers, the agent goes on, leaves the round or raises what it says that it raises; then it works.

A real agent goes through rounds with a server of which one answer at a time is changed: bytes, values, what is inside
base64, the header, statements that the server signs. Nothing may take long or much memory.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import inspect
import json
import random
import re
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import archipel.client
from archipel.bundle import write_weights
from archipel.client import Agent, AgentConfig
from archipel.client.connection.identity import DeviceRecord
from archipel.client.downloads.cache import Cache
from archipel.client.downloads.pieces import PieceDownload
from archipel.client.memory.entry import Entry
from archipel.client.memory.journal import Forgotten
from archipel.client.rounds import exchange
from archipel.errors import BundleError, CertificateError, ClientError
from archipel.protocol import identity, messages
from archipel.protocol.sealed import Sealed, encode, seal
from tests.client.rounds.neighbours.server import READ, SENT
from tests.mutations import mutations
from tests.support.linear_bundle import POPULATION, W0, local_data
from tests.support.scripted_server import STEPS, Change, Reply, Scripted, scripted, sealed_again

# What is left of a connection that broke off is closed when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
CORPUS = Path(__file__).parent / "corpus"
CASES, MANY = 5, 150
WHOLE_BYTES = exchange.WHOLE_BYTES
NOBODY_REVOKED = messages.Revocations(population=POPULATION, epoch=0, devices=[], tokens=[])
LONGEST = 5.0
MOST_MEMORY = 256 << 20

KINDS = {
    messages.EnrolmentResponse: "enrol",
    messages.RotationResponse: "rotate",
    messages.Challenge: "challenge",
    messages.SessionResponse: "session",
    messages.CheckInResponse: "check-in",
    messages.RoundPlan: "check-in",
    messages.RoundStatus: "status",
    messages.Receipt: "update",
    messages.UpdateParts: "parts",
    messages.Cohort: "cohort",
    messages.Shares: "inbox",
    messages.Complaints: "all-complaints",
    messages.Survivors: "survivors",
    messages.Confirmations: "confirmations",
    messages.Problem: "status",
    messages.Offer: "check-in",
    messages.Pieces: "pieces",
    messages.WeightsLog: "log",
    messages.Endorsement: "endorsement",
    Sealed: "revocations",
    messages.Revocations: "revocations",
}
"""Every kind of message that archipel.client decodes, and a step in which it is changed."""
OWN_FILES = {DeviceRecord, Entry, Forgotten}
"""Decoded, but written by the device itself: see test_identity, test_journal and privacy/test_spending."""
HEADERS = {"Retry-After", "Date", "Content-Range", "Content-Length", "Content-Encoding"}
HEADER_VALUES = (
    "", "0", "-1", "1e308", "1e999", "nan", "inf", "99999999999999999999", "soon", "\xff\xfe", "x" * 5000, "0x10",
    "Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 99 Foo 99999 99:99:99 GMT", "gzip",
    "bytes 0-", "bytes 5-4/3", "bytes */0", "bytes 99999999999999999999-99999999999999999999/*", "1, 2", "identity",
)  # fmt: skip


class Fuzzed:
    """An enrolled agent, its server, and cases that go through both."""

    def __init__(self, folder: Path, server: Scripted) -> None:
        self.server, self.folder = server, folder
        config = AgentConfig(
            folder=folder / "device", isolated=False, allow_plain=True, attempts=2, backoff=0.001, max_wait=0.01,
            patience=0.05, connect_timeout=0.5, read_timeout=0.5, request_timeout=2.0, round_timeout=2.0,
            pause_seconds=0.01, poll_jitter=0.0, max_offline_wait=0.01,
        )  # fmt: skip
        self.agent = Agent(config, examples=lambda: local_data(0))
        self.agent.enrol(server.token())
        # A secure round has changed the weights, as the log says; nobody is revoked.
        server.begin()
        self.agent.run_once()
        server.train_securely(W0 + np.float32(0.01))
        server.revoke(encode(seal("revocations", NOBODY_REVOKED, server.key)))

    def forget(self) -> None:
        """The device has not seen the log nor the list of revocations."""
        for path in (self.agent.config.folder / "origins").iterdir():
            path.unlink()
        (self.agent.config.folder / "rounds" / "revoked").unlink(missing_ok=True)

    def case(self, step: str, change: Change, **plan: Any) -> None:
        """One round whose first answer in `step` is changed."""
        server, agent = self.server, self.agent
        server.forget()
        if step in ("bundle", "weights"):
            for name in ("bundles", "blobs", "parts"):
                shutil.rmtree(agent.config.folder / "cache" / name)
                (agent.config.folder / "cache" / name).mkdir()
        if step in ("challenge", "session"):
            agent._session = None
        if step in ("log", "endorsement", "revocations"):
            self.forget()
        if step == "leave":
            plan["min_cohort"] = 2  # fewer than the publisher allows, so that the device refuses
        exchange.WHOLE_BYTES = 0 if step in ("parts", "part") else WHOLE_BYTES
        server.accused = int(step == "all-complaints")  # else the list is not asked for
        server.begin(**plan)
        server.changes[step] = [change]
        began = time.monotonic()
        for _ in range(3):
            try:
                self.act(step)
            except (ClientError, CertificateError):
                # What `run_once`, `enrol` and `rotate_key` say that they raise.
                continue
            if not server.changes[step]:
                break
        assert not server.changes[step], "the answer was not asked for"
        # The round's deadline: where this device left it, nobody finishes it.
        server.phase = server.phase if server.phase == "committed" else "failed"
        agent.run_once()
        assert time.monotonic() - began < LONGEST
        assert all(entry.step == "closed" for entry in agent.rounds)

    def act(self, step: str) -> None:
        if step == "rotate":
            self.agent.rotate_key()
        elif step == "enrol":
            folder = self.folder / "another"
            shutil.rmtree(folder, ignore_errors=True)
            chain = self.server.chain
            try:
                with Agent(AgentConfig(folder=folder, attempts=2, backoff=0.001), examples=dict) as agent:
                    agent.enrol(self.server.token())
            finally:
                self.server.chain = chain
        else:
            self.agent.run_once()

    def works(self) -> None:
        """The agent takes part in a round, all answers of which are right."""
        self.server.forget()
        exchange.WHOLE_BYTES = WHOLE_BYTES
        round_id = self.server.begin()
        for _ in range(5):
            if self.agent.run_once().round_id == round_id:
                break
        [entry] = [entry for entry in self.agent.rounds if entry.round_id == round_id]
        assert (entry.step, entry.result) == ("closed", "took_part"), entry
        assert all(entry.step == "closed" for entry in self.agent.rounds)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzz")
    with scripted(folder) as server:
        made = Fuzzed(folder, server)
        yield made
        made.agent.close()


@pytest.fixture(autouse=True)
def bounded(fuzzed: Fuzzed) -> Iterator[None]:
    """No case may need much memory, and after all of them the agent must work."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_MEMORY
    fuzzed.works()


def inside_base64(body: bytes, rng: random.Random) -> bytes:
    """Another value of one text that is base64: keys, signatures, signed statements."""
    document = json.loads(body)
    found: list[tuple[Any, Any]] = []

    def look(place: Any) -> None:
        for key, value in place.items() if isinstance(place, dict) else enumerate(place):
            if isinstance(value, dict | list):
                look(value)
            elif isinstance(value, str) and len(value) >= 16 and len(value) % 4 == 0:
                found.append((place, key))

    look(document)
    if found:
        place, key = rng.choice(found)
        try:
            data = base64.b64decode(place[key], validate=True)
        except ValueError:
            return body
        place[key] = base64.b64encode(mutated(data, rng)).decode()
    return json.dumps(document).encode()


def mutated(data: bytes, rng: random.Random) -> bytes:
    if data[:1] in b"{[" and data:
        made: bytes = next(mutations(data, rng))
        return made
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(changed) + 1)
        changed[place : place + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 4))
    return bytes(changed)


def any_change(step: str, rng: random.Random, server: Scripted) -> Change:
    def body(reply: Reply) -> Reply:
        return Reply(reply.status, mutated(reply.body, rng), reply.headers)

    def base(reply: Reply) -> Reply:
        return Reply(reply.status, inside_base64(reply.body, rng), reply.headers)

    def raw(reply: Reply) -> bytes:
        return mutated(reply.raw(), rng)

    def header(reply: Reply) -> Reply | bytes:
        made = Reply(reply.status, reply.body, {rng.choice(sorted(HEADERS)): rng.choice(HEADER_VALUES)})
        return made.raw().decode("latin-1").encode("latin-1")

    def status(reply: Reply) -> Reply:
        return Reply(rng.choice([100, 199, 204, 206, 301, 304, 400, 401, 403, 404, 409, 410, 416, 418, 429, 500, 599]),
                     mutated(reply.body, rng), {"Retry-After": rng.choice(HEADER_VALUES)})  # fmt: skip

    changes: list[Change] = [body, raw, header, status]
    if step not in ("bundle", "weights", "revocations", *READ):
        changes.append(base)
    if step == "check-in":
        changes += [sealed_again(server, lambda plan: mutated(plan, rng))] * 3
    return rng.choice(changes)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("cases", [CASES, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", sorted(set(STEPS.values()) - {"pieces", *READ, *SENT} | {"update"}))
def test_an_answer_that_is_not_right(fuzzed: Fuzzed, step: str, cases: int) -> None:
    rng = random.Random(f"{step} {cases}")
    if step == "rotate":
        cases = 4  # the key can be replaced a few times
    for number in range(cases):
        plan = {"privacy": "plain"} if step == "update" and number % 2 else {}
        fuzzed.case(step, any_change(step, rng, fuzzed.server), **plan)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=4)
def test_weights_that_are_the_ones_of_the_plan_and_not_right(fuzzed: Fuzzed, cases: int) -> None:
    """The log says that they are a round's."""
    rng, server = random.Random(cases), fuzzed.server
    weights, right, log = server.weights, server.files["weights"], server.log
    for _ in range(cases):
        server.log = [*log]
        server.train(mutated(right, rng))
        fuzzed.forget()
        fuzzed.case("weights", lambda reply: reply)
        server.weights, server.files["weights"] = weights, right
    server.log = log
    fuzzed.forget()


@pytest.mark.parametrize("cases", [CASES, pytest.param(MANY, marks=pytest.mark.slow)])
def test_logs_and_revocations_that_the_server_signs_and_are_not_right(fuzzed: Fuzzed, cases: int) -> None:
    rng, server = random.Random(cases), fuzzed.server
    log, files, revoked = server.log, dict(server.files), server.revoked
    for number in range(cases):
        if number % 2:
            server.log = [*log[:-1], signed_again(server, "weights", mutated(log[-1].body, rng))]
        else:
            server.revoke(encode(signed_again(server, "revocations", mutated(encode(NOBODY_REVOKED), rng))))
        fuzzed.case("log" if number % 2 else "revocations", lambda reply: reply)
        server.log, server.files, server.revoked = log, dict(files), revoked
        fuzzed.forget()


def signed_again(server: Scripted, label: str, body: bytes) -> Sealed:
    return Sealed(body=body, signature=server.key.sign(f"archipel/v1/{label}\0".encode() + body))


@pytest.mark.parametrize("cases", [CASES, pytest.param(MANY, marks=pytest.mark.slow)])
def test_parts_that_a_file_is_said_to_have(fuzzed: Fuzzed, cases: int) -> None:
    """The file is the right one, or not there."""
    rng, server, agent = random.Random(cases), fuzzed.server, fuzzed.agent
    shared, own = (np.frombuffer(rng.randbytes(32 << 10), np.uint8) for _ in range(2))
    before, after = (write_weights({"a": shared, "b": array}) for array in (own, own[::-1].copy()))
    digest = hashlib.sha256(after).hexdigest()
    right, start = server.files["weights"], after.index(shared.tobytes())
    server.files["weights"] = after
    piece = messages.Piece(offset=start, length=len(shared), sha256=hashlib.sha256(shared.tobytes()).hexdigest())
    server.pieces = messages.Pieces(size=len(after), pieces=[piece])
    agent.run_once()
    session: Any = agent._session
    try:
        for number in range(cases):
            server.forget()
            folder = fuzzed.folder / f"cache {cases} {number}"
            cache = Cache(folder, 1 << 20)
            (folder / "blobs" / hashlib.sha256(before).hexdigest()).write_bytes(before)
            server.changes["pieces"] = [any_change("pieces", rng, server) if number else None]
            try:
                found = cache.weights(digest, PieceDownload(session, cache.index), 1 << 20)
            except (ClientError, BundleError):
                assert number
                continue
            assert found["b"].tobytes() == own[::-1].tobytes()
            assert number or server.steps == ["pieces", "weights", "weights"]
    finally:
        server.files["weights"] = right


@pytest.mark.parametrize("cases", [CASES, pytest.param(MANY, marks=pytest.mark.slow)])
def test_versions_that_are_offered(fuzzed: Fuzzed, cases: int) -> None:
    rng, server = random.Random(cases), fuzzed.server
    folder = fuzzed.folder / f"offered {cases}"
    config = msgspec.structs.replace(fuzzed.agent.config, folder=folder, adopt=True)
    chain = server.chain
    server.forget()
    server.plan = None
    with Agent(config, examples=lambda: local_data(0)) as agent:
        agent.enrol(server.token())
        for number in range(1, cases + 1):
            offer = messages.Offer(
                population=POPULATION, model="linear", version=number, bundle=server.bundle, serial=number
            )
            server.offers = [seal("offer", offer, server.key)]
            change = sealed_again(server, lambda body: mutated(body, rng))
            server.changes["check-in"] = [rng.choice([change, any_change("check-in", rng, server)])]
            began = time.monotonic()
            with contextlib.suppress(ClientError):
                agent.run_once()
            assert time.monotonic() - began < LONGEST
    server.chain, server.offers = chain, []


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
@pytest.mark.parametrize("name", sorted(HEADERS))
@pytest.mark.parametrize("step", ["session", "weights", "update"])
def test_headers(fuzzed: Fuzzed, step: str, name: str, part: int) -> None:
    codes = (200, 206, 416) if step == "weights" else (200, 503)
    for number, value in enumerate(HEADER_VALUES):
        for code in codes:
            if (number + len(name) + code) % 6 != part:
                continue

            def change(reply: Reply, code: int = code, value: str = value) -> bytes:
                lines = [f"HTTP/1.1 {code} X", f"{name}: {value}", "Connection: close"]
                return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + reply.body

            fuzzed.case(step, change)


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.stem)
@pytest.mark.sampled(every=6)
def test_kept_answers(fuzzed: Fuzzed, path: Path) -> None:
    """Raw answers that have found something, for the step that they are named after."""
    fuzzed.case(path.name.partition("--")[0], lambda reply: path.read_bytes())


# --- nothing is left out -----------------------------------------------------------------------------------------


def client_code() -> Iterator[ast.AST]:
    for path in Path(inspect.getfile(archipel.client)).parent.rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


@pytest.mark.sampled(every=3)
def test_every_kind_that_the_agent_decodes_is_fuzzed() -> None:
    """A class that is handed over, not called, is what an answer is decoded as."""
    own = {kind.__name__: kind for kind in OWN_FILES}
    known: dict[str, Any] = {**vars(messages), **vars(identity), "Sealed": Sealed, **own}
    found = set()
    for node in client_code():
        if isinstance(node, ast.Call):
            kinds = [known.get(each.id) for each in node.args if isinstance(each, ast.Name)]
            found |= {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    assert found - OWN_FILES == set(KINDS)
    assert set(KINDS.values()) <= set(STEPS.values())


def test_every_header_that_the_agent_reads_is_fuzzed() -> None:
    found = {
        node.args[0].value
        for node in client_code()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and ast.unparse(node.func.value) == "response.headers"
        and isinstance(node.args[0], ast.Constant)
    }
    assert found == HEADERS


def test_every_step_of_the_agent_is_played() -> None:
    """Paths in archipel.client are those of the scripted server."""
    paths = {
        re.sub("ID|DIGEST|NAME|/2/", lambda found: "/*/" if found[0] == "/2/" else "*", path.split(" ")[1])
        for path in STEPS
    }
    found = set()
    for node in client_code():
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.JoinedStr):
            text = "".join("*" if not isinstance(part, ast.Constant) else str(part.value) for part in node.values)
        if isinstance(text, str) and text.startswith("/v1/") and "(" not in text:  # but patterns of paths
            found.add(text)
    assert len(found) > 8
    # The constant part of a formatted text is seen by itself, too.
    assert [text for text in found if not any(path.startswith(text) for path in paths)] == []
