"""What the server may answer in a round: a case for each row of docs/agent-answers.md."""

from __future__ import annotations

import msgspec

from archipel.protocol import messages as m
from archipel.protocol.sealed import decode, encode
from tests.client.answers.world import NO_ANSWER, STEPS, World, case
from tests.support.scripted_server import Change, Reply, before, refused


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
        end: m.Phase = "committed"

        def over(reply: Reply, end: m.Phase = end) -> Reply | bytes | None:
            world.server.phase = end
            return refused(410)(reply)

        over.early = True  # type: ignore[attr-defined]
        world.answers(step, over)
        assert world.round().kind == "took_part"
    assert world.seen == 4.0 * 3


@case("in a round", "400, 403, 404, 411, 413, 415, 422, another status")
def _(world: World) -> None:
    for status, step in zip((400, 403, 404, 411, 413, 415, 422, 418, 302, 451), STEPS, strict=True):
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


@case("in a round", "any, or none, to its leaving")
def _(world: World) -> None:
    world.restart(allow_plain=False)
    for change in (None, *map(refused, (400, 403, 404, 409, 410, 418)), *NO_ANSWER):
        world.answers("leave", change, change)
        assert world.round(privacy="plain").kind == "refused"
        assert world.asked("leave") in (1, 2)
        assert world.agent.run_once().kind == "waiting"
        assert world.asked("update") == 0
        assert [entry.step for entry in world.agent.rounds[-1:]] == ["closed"]
        world.server.forget()
    world.works()
    assert world.asked("leave") == 0


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
