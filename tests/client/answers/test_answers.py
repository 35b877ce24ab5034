"""Each row of "What the server may answer" in docs/agent.md, against a real agent; no row is without a case."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel import bundle as b
from archipel.client import Agent, AgentConfig, Event, Outcome
from archipel.errors import ClientError, RefusedError, SessionRefusedError, UnreachableError
from archipel.protocol import messages as m
from archipel.protocol.sealed import decode, encode, seal
from tests.client.conftest import POPULATION, local_data, states
from tests.client.scripted import Change, Reply, Scripted, before, refused, scripted

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "agent.md").read_text()
SECTION = PAGE.partition("## What the server may answer\n")[2].partition("\n## ")[0]
NO_ANSWER: tuple[Change, ...] = (
    before(503), lambda reply: None, lambda reply: reply.raw()[:-1], lambda reply: Reply(200, b"<html>"),
    before(429, Retry_After="0"), lambda reply: Reply(200, b" " * (17 << 20)),
)  # fmt: skip
"""Of different kinds; the last is too large for a message."""


def rows() -> Iterator[tuple[str, str]]:
    table = ""
    for line in SECTION.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| answer"):
            table = cells[0]
        elif line.startswith("|") and not line.startswith("|---"):
            yield table, cells[0]


class World:
    """An enrolled agent, the server that plays its part, and the agent's events."""

    def __init__(self, folder: Path, server: Scripted) -> None:
        self.server, self.folder = server, folder
        self.agent = self.start()
        self.agent.enrol(server.token())
        server.forget()

    def start(self, name: str = "device", **changes: Any) -> Agent:
        quick = {
            "attempts": 2, "backoff": 0.001, "max_wait": 0.01, "patience": 2.0, "read_timeout": 1.0,
            "pause_seconds": 0.01, "max_offline_wait": 0.02, "isolated": False, "allow_plain": True,
        }  # fmt: skip
        self.events: list[str] = []
        return Agent(
            AgentConfig(folder=self.folder / name, **{**quick, **changes}),
            examples=lambda: local_data(0),
            on_event=lambda event: self.events.append(event.name),
        )

    def restart(self, **changes: Any) -> None:
        self.agent.close()
        self.agent = self.start(**changes)

    def answers(self, step: str, *changes: Change | None) -> None:
        self.server.changes[step] = list(changes)

    def round(self, **plan: Any) -> Outcome:
        self.server.begin(**plan)
        return self.agent.run_once()

    def asked(self, step: str) -> int:
        return self.server.steps.count(step)

    @property
    def same(self) -> bool:
        """Whether everything that was sent for one step of the last round was the same."""
        return all(len(set(bodies)) == 1 for step, bodies in self.server.bodies.items() if step in SENT)

    @property
    def seen(self) -> float:
        return sum(float(each.state["seen"]) for each in states(self.agent.config.folder))

    def works(self) -> None:
        """In the next round it takes part."""
        self.server.forget()
        assert self.round().kind == "took_part"

    def runs_on(self) -> None:
        """`run_forever` goes on until the next round's end."""
        stop = threading.Event()
        self.agent._on_event = lambda event: stop.set() if event.name == "committed" else None
        timer = threading.Timer(10, stop.set)
        timer.start()
        self.agent.run_forever(stop)
        timer.cancel()
        assert self.agent.rounds[-1].result == "took_part"

    def interrupted(self, after: str) -> None:
        """A round that the agent is killed in at that event: what was on its disk then is what there is."""
        folder, copy = self.agent.config.folder, self.folder / "copy"

        def on_event(event: Event) -> None:
            if event.name == after:
                shutil.copytree(folder, copy)
                raise Killed

        self.agent._on_event = on_event
        with pytest.raises(Killed):
            self.round()
        self.agent.close()
        shutil.rmtree(folder)
        copy.rename(folder)
        self.agent = self.start()
        self.server.forget()


class Killed(BaseException):
    """By SIGKILL."""


SENT = ("advertisement", "shares", "update", "confirmation", "unmasking")
STEPS = ("advertisement", "cohort", "shares", "inbox", "update", "survivors", "confirmation", "confirmations",
         "unmasking")  # fmt: skip
CASES: dict[tuple[str, str], Callable[[World], None]] = {}


def case(table: str, answer: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def register(function: Callable[[World], None]) -> Callable[[World], None]:
        CASES[f"answer {table}", answer] = function
        return function

    return register


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with scripted(tmp_path) as server:
        made = World(tmp_path, server)
        yield made
        made.agent.close()


@pytest.mark.parametrize(("table", "answer"), list(rows()))
def test_each_answer_has_the_next_step_that_the_page_says(world: World, table: str, answer: str) -> None:
    assert (table, answer) in CASES, "a row of docs/agent.md without a case"
    CASES[table, answer](world)


def test_every_case_is_a_row() -> None:
    assert set(CASES) <= set(rows())
    assert len(set(rows())) == len(list(rows())) > 40


# --- a check-in ---------------------------------------------------------------------------------------------------


@case("to a check-in", "200 with a plan")
def _(world: World) -> None:
    assert world.round().kind == "took_part"


@case("to a check-in", "200 with a plan that the pinned key did not sign")
def _(world: World) -> None:
    def signed(reply: Reply) -> Reply:
        return Reply(200, encode(m.CheckInResponse(plan=seal("plan", world.server.plan, b.generate_key()))))

    world.answers("check-in", signed)
    assert world.round().kind == "refused"
    assert world.agent.rounds == []
    assert world.agent.run_once().kind == "took_part"


@case("to a check-in", "200 with a plan of a round that this device was in")
def _(world: World) -> None:
    world.answers("shares", refused(422))
    assert world.round().kind == "dropped"
    world.server.phase = "advertising"
    assert world.agent.run_once().kind == "waiting"
    assert world.asked("advertisement") == 1


@case("to a check-in", "200 without a plan")
def _(world: World) -> None:
    world.answers("bundle", *[before(503)] * 2)
    with pytest.raises(RefusedError):
        world.round()
    world.server.plan = None
    outcome = world.agent.run_once()
    assert (outcome.kind, outcome.wait) == ("waiting", 0.01)
    assert [(entry.step, entry.result) for entry in world.agent.rounds] == [("closed", "dropped")]
    for told, wait in ((-5.0, 0.01), (1e300, 86400.0)):
        world.answers("check-in", lambda reply, told=told: Reply(200, encode(m.CheckInResponse(retry_after=told))))
        assert world.agent.run_once().wait == wait


@case("to a check-in", "200 with an offered version that the pinned key did not sign")
def _(world: World) -> None:
    world.restart(adopt=True)
    offer = m.Offer(population=POPULATION, model="linear", version=1, bundle=world.server.bundle, serial=1)
    world.server.offers = [seal("offer", offer, b.generate_key())]
    assert world.agent.run_once().kind == "waiting"
    assert world.events == ["refused", "waiting"]
    assert world.asked("bundle") == 0


@case("to a check-in", "401")
def _(world: World) -> None:
    world.agent.run_once()
    world.server.forget()
    world.answers("check-in", before(401))
    assert world.round().kind == "took_part"
    assert world.server.steps[:4] == ["check-in", "challenge", "session", "check-in"]


@case("to a check-in", "401 again, no answer")
def _(world: World) -> None:
    for change in (before(401), *NO_ANSWER):
        world.answers("check-in", change, change)
        with pytest.raises((UnreachableError, RefusedError)):
            world.agent.run_once()
    world.answers("check-in", *[change for change in NO_ANSWER for _ in range(2)], *[before(401)] * 4)
    world.server.begin()
    world.runs_on()


@case("to a check-in", "400, 403, 404, another status")
def _(world: World) -> None:
    for status in (400, 403, 404, 418, 302):
        world.answers("check-in", refused(status))
        with pytest.raises(RefusedError, match=f"HTTP {status}"):
            world.agent.run_forever(threading.Event())


# --- a download ---------------------------------------------------------------------------------------------------


def part(world: World, data: bytes) -> Path:
    """What a download that broke off left."""
    path = world.agent.config.folder / "cache" / "parts" / world.server.weights
    path.write_bytes(data)
    return path


@case("to a download", "200")
def _(world: World) -> None:
    data = world.server.files["weights"]
    path = part(world, b"from before")
    world.answers("weights", lambda reply: Reply(200, data))
    assert world.round().kind == "took_part"
    assert (world.asked("bundle"), world.asked("weights")) == (1, 1)
    assert not path.exists()


@case("to a download", "206 with the part that was asked for")
def _(world: World) -> None:
    part(world, world.server.files["weights"][:20])
    sent = []
    world.answers("weights", lambda reply: sent.append(reply) or reply)
    assert world.round().kind == "took_part"
    assert sent[0].status == 206
    assert len(sent[0].body) == len(world.server.files["weights"]) - 20
    assert world.asked("weights") == 1


@case("to a download", "206 with another part")
def _(world: World) -> None:
    part(world, world.server.files["weights"][:20])
    world.answers("weights", lambda reply: Reply(206, reply.body, {"Content-Range": "bytes 5-9/10"}))
    assert world.round().kind == "took_part"
    assert world.asked("weights") == 2


@case("to a download", "416 with the size of the part that is there")
def _(world: World) -> None:
    data = world.server.files["weights"]
    part(world, data)
    world.answers("weights", lambda reply: Reply(416, b"", {"Content-Range": f"bytes */{len(data)}"}))
    assert world.round().kind == "took_part"
    assert world.asked("weights") == 1


@case("to a download", "416 otherwise")
def _(world: World) -> None:
    part(world, world.server.files["weights"] + b"more")
    assert world.round().kind == "took_part"
    assert world.asked("weights") == 2


@case("to a download", "no list of the parts that a file has, or a wrong one")
def _(world: World) -> None:
    assert world.round().kind == "took_part"
    cache = world.agent.config.folder / "cache"
    tensor = np.arange(20 << 10, dtype=np.float32)
    (cache / "blobs" / "another").write_bytes(b.write_weights({"a": tensor}))
    shared = hashlib.sha256(tensor.tobytes()).hexdigest()
    piece = m.Piece(offset=0, length=tensor.nbytes, sha256=shared)
    wrong = [m.Pieces(size=size, pieces=[piece]) for size in (tensor.nbytes, 2**40, 1)]
    for change in (before(404), NO_ANSWER[0], *(lambda reply, said=said: Reply(200, encode(said)) for said in wrong)):
        shutil.rmtree(cache / "bundles" / world.server.bundle)
        world.server.forget()
        world.answers("pieces", *[change] * 4)
        assert world.round().kind == "took_part"
        assert (world.asked("pieces") >= 1, world.asked("bundle")) == (True, 1)


@case("to a download", "other bytes than the plan says")
def _(world: World) -> None:
    path = part(world, b"wrong")
    assert world.round().kind == "took_part"
    assert world.asked("weights") == 2
    for step in ("weights", "bundle"):
        world.restart()
        for folder in ("blobs", "bundles"):
            for kept in (world.agent.config.folder / "cache" / folder).iterdir():
                kept.rename(world.folder / f"{step}-{kept.name}")
        world.server.forget()
        world.answers(step, lambda reply: Reply(200, b"wrong"))
        assert world.round().kind == "refused"
        assert world.asked(step) == 1
        assert not path.exists()


@case("to a download", "more bytes than the owner allows")
def _(world: World) -> None:
    world.restart(max_download_bytes=20)
    outcome = world.round()
    assert (outcome.kind, "the limit here is 20" in outcome.reason) == ("refused", True)


@case("to a download", "401")
def _(world: World) -> None:
    world.answers("weights", before(401))
    assert world.round().kind == "took_part"
    assert world.asked("session") == 2


@case("to a download", "no answer")
def _(world: World) -> None:
    short = world.server.files["weights"][:30]
    world.answers("weights", lambda reply: reply.raw()[: -len(reply.body)] + short, before(503))
    with pytest.raises(RefusedError, match="503"):
        world.round()
    assert [entry.step for entry in world.agent.rounds] == ["assigned"]
    assert world.agent.run_once().kind == "took_part"
    assert world.asked("weights") == 3
    assert len(world.agent.rounds) == 1


@case("to a download", "400, 403, 404, 410, another status")
def _(world: World) -> None:
    for status in (400, 403, 404, 410, 418, 302):
        world.answers("bundle", refused(status))
        assert world.round().kind == "refused"
    assert world.asked("advertisement") == 0


# --- a round ------------------------------------------------------------------------------------------------------


@case("in a round", "200")
def _(world: World) -> None:
    assert world.round().kind == "took_part"
    assert [world.asked(step) for step in STEPS] == [1] * len(STEPS)


@case("in a round", "409 too early")
def _(world: World) -> None:
    def still(phase: str) -> Change:
        return lambda reply: Reply(
            200, encode(msgspec.structs.replace(decode("", reply.body, m.RoundStatus), phase=phase))
        )

    for step in ("cohort", "survivors"):
        world.answers(step, before(409))
        assert world.round().kind == "took_part"
        assert world.asked(step) == 2
        world.server.forget()
    # A message that is sent: the phase is asked for until it has come.
    world.answers("shares", before(409))
    world.answers("status", None, still("advertising"), still("advertising"))
    assert world.round().kind == "took_part"
    assert (world.asked("shares"), world.same) == (2, True)
    between = world.server.steps[world.server.steps.index("shares") : len(world.server.steps)]
    assert between[:5] == ["shares", "status", "status", "status", "shares"]


@case("in a round", "409 otherwise")
def _(world: World) -> None:
    world.answers("shares", before(409))
    assert world.round().kind == "dropped"
    assert world.asked("shares") == 1


@case("in a round", "410 before the survivors are known")
def _(world: World) -> None:
    for step in STEPS[: STEPS.index("survivors") + 1]:
        world.answers(step, before(410))
        assert world.round().kind == "dropped"
    assert world.seen == 0
    world.answers("update", before(410))
    assert world.round(privacy="plain").kind == "dropped"


@case("in a round", "410 after that")
def _(world: World) -> None:
    for step in STEPS[STEPS.index("confirmation") :]:
        end = "committed"

        def over(reply: Reply, end: Any = end) -> Reply | bytes | None:
            world.server.phase = end
            return refused(410)(reply)

        over.early = True  # type: ignore[attr-defined]
        world.answers(step, over)
        assert world.round().kind == "took_part"
    assert world.seen == 4.0 * 3


@case("in a round", "400, 403, 404, 411, 413, 415, 422, another status")
def _(world: World) -> None:
    for status, step in zip((400, 403, 404, 411, 413, 415, 422, 418, 302), STEPS, strict=True):
        world.answers(step, before(status))
        outcome = world.round()
        if step in ("confirmation", "confirmations", "unmasking"):
            # Its update is in the sum already: what becomes of it is asked for until it is known.
            assert outcome.kind == "paused"
            world.server.phase = "failed"
            world.agent.run_once()
        else:
            assert (outcome.kind, f"HTTP {status}" in outcome.reason) == ("dropped", True)
        assert world.agent.rounds[-1].result == "dropped"


@case("in a round", "401")
def _(world: World) -> None:
    for step in STEPS:
        world.server.forget()
        world.answers(step, before(401))
        assert world.round().kind == "took_part"
        assert world.asked("session") >= 1
        assert world.same


@case("in a round", "401 again, no answer")
def _(world: World) -> None:
    for number, step in enumerate(STEPS):
        world.server.forget()
        world.answers(step, *[before(401)] * 4, *[NO_ANSWER[number % len(NO_ANSWER)]] * 4)
        assert world.round().kind == "took_part"
        assert world.same
    world.restart(patience=0.05)
    world.server.forget()
    world.answers("shares", *[before(503)] * 999)
    assert world.round().kind == "dropped"
    assert world.same


@case("in a round", "a message that its peers or its plan contradict")
def _(world: World) -> None:
    nobody = {
        "cohort": m.Cohort(members=[]), "inbox": m.Shares(shares=[]), "survivors": m.Survivors(devices=[]),
    }  # fmt: skip
    for step, message in nobody.items():
        world.answers(step, lambda reply, message=message: Reply(200, encode(message)))
        assert world.round().kind == "dropped"
    assert world.seen == 0


def ends(world: World, phase: m.Phase) -> Change:
    def change(reply: Reply) -> Reply:
        world.server.phase = phase
        return reply

    return change


@case("in a round", "the round failed")
def _(world: World) -> None:
    for step in STEPS:
        world.answers(step, ends(world, "failed"))
        outcome = world.round()
        assert (outcome.kind, world.agent.rounds[-1].step) == ("dropped", "closed"), step
    assert world.seen == 0


@case("in a round", "the round was committed before this device had a part in it")
def _(world: World) -> None:
    world.answers("advertisement", ends(world, "committed"))
    world.answers("cohort", before(410))
    assert world.round().kind == "dropped"
    assert world.seen == 0


@case("in a round", "a phase that does not end")
def _(world: World) -> None:
    world.restart(round_timeout=0.1)
    world.answers("advertisement", ends(world, "advertising"))
    outcome = world.round()
    assert (outcome.kind, "not over after 0.1 s" in outcome.reason) == ("dropped", True)


# --- an interrupted round -----------------------------------------------------------------------------------------


def counted(world: World) -> None:
    """A round in which the agent was stopped when it had confirmed."""
    world.interrupted("confirmed")
    assert world.agent.rounds[-1].step == "confirming"


def settled(world: World, result: str, seen: float) -> None:
    assert [(entry.step, entry.result) for entry in world.agent.rounds] == [("closed", result)]
    assert world.seen == seen
    world.works()


@case("about an interrupted round", "committed, with this device's update")
def _(world: World) -> None:
    counted(world)
    world.server.phase = "committed"
    world.agent.run_once()
    settled(world, "took_part", 4.0)


@case("about an interrupted round", "failed")
def _(world: World) -> None:
    counted(world)
    world.server.phase = "failed"
    world.agent.run_once()
    settled(world, "dropped", 0.0)


def waits(world: World) -> None:
    assert world.agent.run_once().kind == "waiting"
    assert world.asked("check-in") == 0
    assert world.agent.rounds[-1].step == "confirming"


@case("about an interrupted round", "another phase")
def _(world: World) -> None:
    counted(world)
    waits(world)
    world.server.phase = "committed"
    world.agent.run_once()
    settled(world, "took_part", 4.0)


@case("about an interrupted round", "401 again, no answer to the question")
def _(world: World) -> None:
    counted(world)
    for change in (before(401), *NO_ANSWER):
        world.answers("status", change, change)
        waits(world)
    world.server.phase = "committed"
    world.agent.run_once()
    settled(world, "took_part", 4.0)


@case("about an interrupted round", "400, 403, 404, 410 to the question")
def _(world: World) -> None:
    for status in (400, 403, 404, 410):
        counted(world)
        world.answers("status", before(status))
        world.server.plan = None
        world.agent.run_once()
        assert world.agent.rounds[-1].result == "dropped"
    assert world.seen == 0
    world.works()


def stored(world: World) -> None:
    """A round in which the agent was killed when its update was on the disk, not sent."""
    world.interrupted("masked")
    assert world.agent.rounds[-1].step == "masked"


@case("about an interrupted round", "200 to the stored update")
def _(world: World) -> None:
    stored(world)
    world.server.phase = "masking"
    world.agent.run_once()
    assert world.asked("update") == 1
    settled(world, "dropped", 0.0)


@case("about an interrupted round", "409, 410, another refusal of the stored update")
def _(world: World) -> None:
    for status in (409, 410, 403, 422):
        stored(world)
        world.answers("update", before(status))
        world.agent.run_once()
        [*_, entry] = world.agent.rounds
        assert (entry.result, f"HTTP {status}" in entry.reason) == ("dropped", True)
    world.works()


@case("about an interrupted round", "401 again, no answer to the stored update")
def _(world: World) -> None:
    stored(world)
    for change in (before(401), before(503), lambda reply: None):
        world.answers("update", change, change)
        with pytest.raises((RefusedError, UnreachableError)):
            world.agent.run_once()
        assert world.agent.rounds[-1].step == "masked"
    world.agent.run_once()
    assert world.same
    settled(world, "dropped", 0.0)


# --- the identity -------------------------------------------------------------------------------------------------


@case("about the identity", "200 to the enrolment")
def _(world: World) -> None:
    with world.start("other") as agent:
        agent.enrol(world.server.token())
        assert (world.folder / "other" / "device.json").exists()
        assert agent.run_once().kind == "waiting"


@case("about the identity", "200 to the enrolment, for another device")
def _(world: World) -> None:
    # The record is what the device knows of itself.
    world.answers("enrol", lambda reply: Reply(200, encode(m.EnrolmentResponse(device_id="e" * 32))))
    with world.start("other") as agent, pytest.raises(ClientError, match=f"calls this device {'e' * 32}"):
        agent.enrol(world.server.token())
    assert not (world.folder / "other" / "device.json").exists()


@case("about the identity", "400, 403, 409 to the enrolment")
def _(world: World) -> None:
    with world.start("other") as agent:
        for status in (400, 403, 409):
            world.answers("enrol", before(status))
            with pytest.raises(RefusedError, match=f"HTTP {status}"):
                agent.enrol(world.server.token())
        assert agent.device_id == ""


@case("about the identity", "no answer to the enrolment")
def _(world: World) -> None:
    token = world.server.token()
    with world.start("other") as agent:
        for change in NO_ANSWER:
            world.answers("enrol", change, change)
            with pytest.raises((UnreachableError, RefusedError)):
                agent.enrol(token)
        assert agent.device_id == ""
        assert agent.enrol(token) == agent.device_id
    assert len(set(world.server.bodies["enrol"])) == 1


@case("about the identity", "200 to the proof")
def _(world: World) -> None:
    def soon(reply: Reply) -> Reply:
        body = encode(m.SessionResponse(token="t", expires=1_000_000_100.0))
        return Reply(200, body, {"Date": "Sun, 09 Sep 2001 01:46:40 GMT"})

    world.answers("session", soon)
    world.agent.run_once()
    world.agent.run_once()
    assert world.asked("session") == 1
    session: Any = world.agent._session
    session._renew_at -= 81  # of the 100 s by the server's clock
    world.agent.run_once()
    assert world.asked("session") == 2


@case("about the identity", "403 to the proof")
def _(world: World) -> None:
    world.answers("session", refused(403))
    assert world.agent.run_once().kind == "waiting"
    assert (world.asked("challenge"), world.asked("session")) == (2, 2)
    world.restart()
    world.answers("session", refused(403), refused(403))
    with pytest.raises(SessionRefusedError):
        world.agent.run_forever(threading.Event())


@case("about the identity", "no answer to the proof")
def _(world: World) -> None:
    for change in (lambda reply: None, lambda reply: Reply(200, b"<html>"), lambda reply: reply.raw()[:-1]):
        world.restart()
        world.server.forget()
        world.answers("session", change)
        assert world.agent.run_once().kind == "waiting"
        assert (world.asked("challenge"), world.asked("session")) == (2, 2)
        nonces = [decode("", body, m.SessionRequest).proof for body in world.server.bodies["session"]]
        assert nonces[0] != nonces[1]


@case("about the identity", "403, 404 to the challenge")
def _(world: World) -> None:
    for status in (403, 404):
        world.restart()
        world.answers("challenge", *[before(status)] * 2)
        with pytest.raises(SessionRefusedError, match=f"HTTP {status}"):
            world.agent.run_forever(threading.Event())
        world.server.forget()


@case("about the identity", "200 to the next key")
def _(world: World) -> None:
    key = (world.folder / "device" / "device.key").read_bytes()
    assert world.agent.rotate_key()
    assert (world.folder / "device" / "device.key").read_bytes() != key
    assert not (world.folder / "device" / "device.key.next").exists()
    world.works()


@case("about the identity", "404, 405, 409 to the next key")
def _(world: World) -> None:
    for status in (404, 405, 409):
        world.answers("rotate", before(status))
        assert not world.agent.rotate_key()
    world.answers("rotate", before(409))
    assert world.round().kind == "took_part"
    world.agent.run_once()
    assert not world.agent._device.identity.rotating
    assert world.same
    world.works()


@case("about the identity", "no answer to the next key")
def _(world: World) -> None:
    world.answers("rotate", *[lambda reply: None] * 2)
    with pytest.raises(UnreachableError):
        world.agent.rotate_key()
    # The server took it, and the device does not know.
    assert world.agent.run_once().kind == "waiting"
    assert len(set(world.server.bodies["rotate"])) == 1
    assert not world.agent._device.identity.rotating
    world.works()


@case("about the identity", "a session refused to the old key while there is a next one")
def _(world: World) -> None:
    world.answers("rotate", before(409), before(409))
    assert not world.agent.rotate_key()
    world.answers("session", refused(403), refused(403))
    assert world.agent.run_once().kind == "waiting"
    assert world.asked("rotate") == 3
    assert not world.agent._device.identity.rotating
