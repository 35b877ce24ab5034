"""A server that lies to a device in a round over neighbours gets no vector and no share out of it.

A real agent, with real peers, meets one lie at a time. After each it must not have sent what the lie was to get: its
envelopes, its masked vector, its signatures that others are present, or its shares. Lies that need many devices are in
tests/protocol/secagg_plus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.protocol.secagg_plus.member import Member
from archipel.protocol.secagg_plus.messages import (
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Packed,
    Partners,
    Question,
    Refused,
    pack,
    unpack,
)
from tests.client.rounds.neighbours.world import NeighbourWorld, opened
from tests.support.scripted_server import Reply

Lie = Callable[[Any, NeighbourWorld], Packed]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[NeighbourWorld]:
    with opened(tmp_path) as made:
        yield made


def lied_to(world: NeighbourWorld, step: str, kind: type[Packed], lie: Lie) -> None:
    """One round in which every answer of the server in this step is changed by the lie."""

    def changed(reply: Reply) -> Reply:
        return Reply(200, pack(lie(unpack(reply.body, kind), world)))

    world.answers(step, *[changed] * 5)
    world.round()
    assert world.asked(step) > 0


def other_root(invitation: Invitation, world: NeighbourWorld) -> Invitation:
    """A cohort of which the server shows other members than it fixed."""
    return msgspec.structs.replace(invitation, root=bytes(32))


def too_few(invitation: Invitation, world: NeighbourWorld) -> Invitation:
    """A cohort in which all are neighbours of all, of as few as the threshold."""
    return msgspec.structs.replace(invitation, size=4, place=0)


def own_device(neighbours: Neighbours, world: NeighbourWorld) -> Neighbours:
    """In place of a member the server puts one that it made itself."""
    member = msgspec.msgpack.decode(neighbours.members[0], type=Member)
    made = msgspec.msgpack.encode(msgspec.structs.replace(member, keys=bytes(range(96))))
    return msgspec.structs.replace(neighbours, members=[made, *neighbours.members[1:]])


def one_for_all(neighbours: Neighbours, world: NeighbourWorld) -> Neighbours:
    """One device stands at the places of two."""
    return msgspec.structs.replace(neighbours, members=[neighbours.members[1], *neighbours.members[1:]])


@pytest.mark.parametrize(
    ("step", "kind", "lie"),
    [
        ("invitation", Invitation, other_root), ("invitation", Invitation, too_few),
        ("neighbours", Neighbours, own_device), ("neighbours", Neighbours, one_for_all),
    ],
)  # fmt: skip
def test_who_the_others_are(world: NeighbourWorld, step: str, kind: type[Packed], lie: Lie) -> None:
    """The device shares no secret with a cohort that is not what it was told."""
    lied_to(world, step, kind, lie)
    assert world.asked("dealt") == world.asked("update") == 0


def everybody_left(partners: Partners, world: NeighbourWorld) -> Partners:
    """All whom the device drew are said to be gone, so that the server knows all of its masks but one."""
    own = world.server.roster.drawn[world.server.place].tolist()
    return Partners(gone=sorted(own), others=[], mask_keys=b"")


def strangers(partners: Partners, world: NeighbourWorld) -> Partners:
    """The server makes up somebody who has left whom the device never drew."""
    return msgspec.structs.replace(partners, gone=[world.server.place])


@pytest.mark.parametrize("lie", [everybody_left, strangers])
def test_who_shares_masks(world: NeighbourWorld, lie: Lie) -> None:
    lied_to(world, "partners", Partners, lie)
    assert world.asked("update") == 0


def both_kinds(question: Question, world: NeighbourWorld) -> Question:
    """Both shares of one device: its vector and all of its masks."""
    return msgspec.structs.replace(question, left=[*question.left, question.present[0]])


def nobody_elses(question: Question, world: NeighbourWorld) -> Question:
    """A share that the device does not hold: it must not be led to make something up."""
    return msgspec.structs.replace(question, present=[*question.present, world.server.place])


@pytest.mark.parametrize("lie", [both_kinds, nobody_elses])
def test_what_to_show(world: NeighbourWorld, lie: Lie) -> None:
    lied_to(world, "question", Question, lie)
    assert world.asked("included") == world.asked("answer") == 0


def too_few_say_so(inclusions: Inclusions, world: NeighbourWorld) -> Inclusions:
    """Fewer neighbours than the threshold take the device as present: the rest could show its mask key."""
    kept = world.server.plan.threshold - 1  # type: ignore[union-attr]
    return Inclusions(neighbours=inclusions.neighbours[:kept], signatures=inclusions.signatures[: 64 * kept])


def forged(inclusions: Inclusions, world: NeighbourWorld) -> Inclusions:
    """As many as are needed, of which the server has made up two."""
    real = 64 * (len(inclusions.neighbours) - 2)
    return msgspec.structs.replace(inclusions, signatures=inclusions.signatures[:real] + bytes(128))


def counted_twice(inclusions: Inclusions, world: NeighbourWorld) -> Inclusions:
    """One signature, for as many neighbours as are needed."""
    count = len(inclusions.neighbours)
    return Inclusions(neighbours=inclusions.neighbours[:1] * count, signatures=inclusions.signatures[:64] * count)


@pytest.mark.parametrize("lie", [too_few_say_so, forged, counted_twice])
def test_who_takes_the_device_as_present(world: NeighbourWorld, lie: Lie) -> None:
    lied_to(world, "inclusions", Inclusions, lie)
    assert world.asked("included") == 1
    assert world.asked("answer") == 0


def under_another_name(inbox: Inbox, world: NeighbourWorld) -> Inbox:
    """Two envelopes change their dealers, so that the shares of one are shown for the other."""
    one, two, *rest = inbox.dealers
    return msgspec.structs.replace(inbox, dealers=[two, one, *rest])


def test_whose_envelopes_they_are(world: NeighbourWorld) -> None:
    """Such envelopes do not open, and their dealers are named as refused; their shares are never shown."""
    server = world.server
    lied_to(world, "dealings", Inbox, under_another_name)
    [said] = server.bodies["refused"]
    assert sorted(unpack(said, Refused).dealers) == sorted(server.roster.dealers(server.place)[:2])


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 3}, {"partners": 4}, {"threshold": 2, "neighbours": 3, "partners": 3},
        {"protocol": "complete", "threshold": 4},
    ],
)  # fmt: skip
def test_plans_with_smaller_sizes(world: NeighbourWorld, changes: dict[str, Any]) -> None:
    """A plan with sizes that the publisher's policy does not allow, or whose protocol knows no neighbours."""
    outcome = world.round(**changes)
    assert outcome.kind == "refused"
    assert world.asked("member") == world.asked("update") == 0


def test_the_same_round_once_more(world: NeighbourWorld) -> None:
    """The server begins a round anew, with its plan of before, to have another vector under the same names."""
    assert world.round().kind == "took_part"
    first = list(world.server.bodies["member"])
    world.server.phase, world.server.kept = "advertising", {}
    for _ in range(3):
        world.agent.run_once()
    assert world.server.bodies["member"] == first
    assert world.asked("update") == 1
