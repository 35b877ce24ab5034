"""What a server of a round over neighbours may try, and how honest devices end it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.errors import (
    CertificateError,
    ConsistencyError,
    MessageError,
    PolicyError,
    SecureAggregationError,
    ShareError,
    ThresholdError,
)
from archipel.protocol import public_bytes
from archipel.protocol.revocations import Revoked
from archipel.protocol.secagg_plus.member import Session, read_member, sign_member, split_keys
from archipel.protocol.secagg_plus.messages import (
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Partners,
    Question,
)
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.roster import Roster
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from tests.support.neighbour_rounds import ENROLMENT, SESSION, NeighbourRound, enrolled, make_terms
from tests.support.rounds import fixed, stream

COUNT = 12
SIZES = Sizes(8, 6, 8)
# 8 + 1 corrupt + 3 hidden at most 2 * 6.
ASSUMED = Assumptions(0.1, 0.2, "malicious", hidden=3, security=1, correctness=1)


def make(step: str, draws: Any = None) -> NeighbourRound:
    """A round in which everybody has done what comes before `step`."""
    run = NeighbourRound(COUNT, make_terms(SIZES, ASSUMED, COUNT), draws)
    run.open()
    everybody = range(COUNT)
    if step in ("receive", "mask", "answer"):
        run.deal(everybody)
    if step in ("mask", "answer"):
        run.receive(everybody)
    if step == "answer":
        run.mask({place: np.full(3, place, np.uint32) for place in everybody})
    return run


def gone(device: Participant) -> None:
    """The device has left the round, and its secrets with it."""
    with pytest.raises(SecureAggregationError, match="left the round"):
        device.answer(Question(present=[], left=[]))


def test_asking_for_both_shares_of_a_device() -> None:
    run = make("answer")
    honest = run.roster.ask(0, run.survivors)
    with pytest.raises(ConsistencyError, match="both of its shares"):
        run.devices[0].confirm(Question(present=honest.present, left=honest.present[:1]))
    gone(run.devices[0])


def test_asking_for_the_one_share_and_then_for_the_other() -> None:
    run = make("answer")
    honest = run.roster.ask(0, run.survivors)
    run.devices[0].confirm(honest)
    other = Question(present=honest.present[1:], left=honest.present[:1])
    with pytest.raises(ConsistencyError, match="not the one that this device has confirmed"):
        run.devices[0].answer(other)
    gone(run.devices[0])


def test_asking_twice() -> None:
    run = make("answer")
    run.answer(range(COUNT))
    with pytest.raises(SecureAggregationError, match="expected 'done'"):
        run.devices[0].answer(run.questions[0])


def test_asking_for_somebody_whose_shares_the_device_does_not_hold() -> None:
    run = make("answer")
    foreign = next(place for place in range(COUNT) if place not in run.roster.ask(0, run.survivors).present)
    with pytest.raises(ConsistencyError, match="holds no shares"):
        run.devices[0].confirm(Question(present=[foreign], left=[]))


def test_telling_neighbours_different_things_gives_at_most_one_secret() -> None:
    # The server tells half of the victim's holders that it left, and the others that it is present; one holder is
    # corrupt and gives both shares. However it divides them, fewer than `threshold` shares come of one of the two.
    run = make("answer")
    victim, (corrupt, *honest) = 0, run.roster.drawn[0].tolist()
    for told_present in range(len(honest) + 1):
        seeds, mask_keys = 1 + told_present, 1 + len(honest) - told_present
        assert min(seeds, mask_keys) < SIZES.threshold
    # And with honest devices: whoever has confirmed one of the two shows no other, see above.
    questions = {}
    for index, place in enumerate(honest):
        asked = run.roster.ask(place, run.survivors)
        if index % 2:
            asked = Question(present=[p for p in asked.present if p != victim], left=[*asked.left, victim])
        questions[place] = asked
        run.devices[place].confirm(asked)
    assert corrupt not in questions
    assert sum(victim in question.present for question in questions.values()) + 1 < SIZES.threshold


def test_devices_that_are_told_to_be_gone_elsewhere_show_nothing() -> None:
    # The attack: the victim's neighbours seem to have left, so that the masks that they share with it can be taken
    # off, and yet they help to take off the victim's own.
    run = make("answer")
    victim = 0
    neighbours = set(run.roster.drawn[victim].tolist())
    questions, confirmed = {}, {}
    for place in range(COUNT):
        asked = run.roster.ask(place, run.survivors)
        present = [dealer for dealer in asked.present if dealer not in neighbours]
        questions[place] = Question(present=present, left=[d for d in asked.present if d in neighbours])
        confirmed[place] = run.devices[place].confirm(questions[place])
    for place in sorted(neighbours):
        inclusions = run.roster.include(place, questions, confirmed)
        assert inclusions.neighbours == []
        with pytest.raises(ThresholdError, match="0 neighbours take this device as present, the threshold is 6"):
            run.devices[place].answer(questions[place], inclusions)


@pytest.mark.sampled(every=3)
def test_signatures_of_others_do_not_make_a_device_present() -> None:
    for forge, error in (
        (lambda own: own[:1] * SIZES.threshold, ConsistencyError),
        (lambda own: [(neighbour, own[0][1]) for neighbour, _ in own], ThresholdError),
        (lambda own: [(0, bytes(64))], ConsistencyError),
        (lambda own: own[: SIZES.threshold - 1], ThresholdError),
    ):
        run = make("answer")
        questions = {place: run.roster.ask(place, run.survivors) for place in range(COUNT)}
        confirmed = {place: run.devices[place].confirm(questions[place]) for place in range(COUNT)}
        own = run.roster.include(0, questions, confirmed)
        signatures = [own.signatures[start : start + 64] for start in range(0, len(own.signatures), 64)]
        forged = forge(list(zip(own.neighbours, signatures, strict=True)))
        with pytest.raises(error):
            run.devices[0].answer(
                questions[0],
                Inclusions(neighbours=[place for place, _ in forged], signatures=b"".join(made for _, made in forged)),
            )
        gone(run.devices[0])


def test_another_member_at_a_drawn_place() -> None:
    run = make("draw")
    device = run.devices[0]
    drawn = device.draw(run.roster.invite(0))
    honest = run.roster.introduce(0, drawn)
    unused = next(place for place in range(1, COUNT) if place not in drawn.places)
    members = [run.roster.members[unused], *honest.members[1:]]
    with pytest.raises(ConsistencyError, match="not those that its root stands for"):
        device.deal(Neighbours(members=members, proof=honest.proof))
    gone(device)


def test_a_cohort_of_other_sizes_than_the_plan_allows() -> None:
    for size, place in ((2, 0), (COUNT + 1, 0), (COUNT, COUNT)):
        run = make("draw")
        with pytest.raises(ThresholdError, match=f"place {place} of {size}"):
            run.devices[0].draw(Invitation(size=size, root=run.roster.root, place=place))


def test_a_plan_with_smaller_neighbourhoods_than_the_device_insists_on() -> None:
    run = NeighbourRound(COUNT, make_terms(Sizes(8, 5, 8), ASSUMED, COUNT))
    run.open()
    with pytest.raises(PolicyError, match="threshold 5 of 8 neighbours"):
        run.devices[0].draw(run.roster.invite(0))


def test_different_cohorts_for_different_devices() -> None:
    # Device 0 deals to a cohort without device 1; nobody of the other cohort can open what it sealed.
    run = make("draw")
    run.deal([place for place in range(COUNT) if place != 0])
    smaller = Roster([member for place, member in enumerate(run.roster.members) if place != 1], SIZES)
    drawn = run.devices[0].draw(smaller.invite(0))
    dealt = run.devices[0].deal(smaller.introduce(0, drawn))
    run.roster.drawn[0] = [place + (place >= 1) for place in drawn.places]
    run.roster.take(0, dealt)
    holders = run.roster.drawn[0].tolist()
    assert all(run.devices[place].receive(run.roster.inbox(place)).dealers == [0] for place in holders)


@pytest.mark.sampled(every=3)
def test_an_envelope_passed_off_as_another_dealer_s() -> None:
    # Otherwise the server could ask for the seed's share under the one name and for the mask key's under the other.
    run = make("receive")
    inbox = run.roster.inbox(0)
    first, second = inbox.dealers[:2]
    position, key, dealt = inbox.positions[0], inbox.cipher_keys[:32], inbox.dealt[:132]

    def passed_off(*names: int) -> Inbox:
        """The first dealer's envelope under these names."""
        count = len(names)
        return Inbox(dealers=names, positions=[position] * count, cipher_keys=key * count, dealt=dealt * count)

    assert run.devices[0].receive(passed_off(first, second)).dealers == [second]
    for names in ((first, first), (second, second), (0,), (COUNT,)):
        run = make("receive")
        with pytest.raises(ShareError, match=r"twice|nobody else"):
            run.devices[0].receive(passed_off(*names))


@pytest.mark.sampled(every=3)
def test_partners_that_seem_to_be_gone() -> None:
    run = make("mask")
    own = run.roster.drawn[0].tolist()
    vector = np.zeros(3, np.uint32)
    with pytest.raises(ThresholdError, match="5 of 8 are still there, 6 are needed"):
        run.devices[0].mask(vector, Partners(gone=sorted(own[:3]), others=[], mask_keys=b""))
    gone(run.devices[0])
    stranger = next(place for place in range(1, COUNT) if place not in own)
    run = make("mask")
    with pytest.raises(ConsistencyError, match="did not draw"):
        run.devices[0].mask(vector, Partners(gone=[stranger], others=[], mask_keys=b""))
    for others in ([0], [stranger, stranger]):
        run = make("mask")
        key = run.roster.keys[stranger].mask_key
        with pytest.raises(ConsistencyError, match="itself, or somebody twice"):
            run.devices[0].mask(vector, Partners(gone=[], others=others, mask_keys=key * len(others)))


def test_a_mask_key_that_the_server_made_hides_no_less() -> None:
    # It can name its own key for somebody who drew the device: a mask that it knows is added to those that it does not.
    run, honest = make("mask"), make("mask")
    vector = np.zeros(3, np.uint32)
    partners = run.roster.pair(0, run.sharers)
    forged = msgspec.structs.replace(partners, mask_keys=run.roster.keys[1].cipher_key * len(partners.others))
    masked = run.devices[0].mask(vector, forged)
    # Pairs that drew each other keep the key that the device has verified; of the others the server's counts.
    drew = set(run.roster.drawn[0].tolist())
    one_sided = [other for other in partners.others if other not in drew]
    assert one_sided
    assert (masked != honest.devices[0].mask(vector, honest.roster.pair(0, honest.sharers))).any()


def test_members_of_other_rounds_plans_populations_or_nobody() -> None:
    run = make("draw")
    member, key = run.roster.members[0], public_bytes(ENROLMENT)
    device, _ = read_member(member, SESSION, key, "plants")
    assert device.device_id == run.devices[0].device_id
    for session in (
        Session(fixed("another round", 16).hex(), SESSION.plan), Session(SESSION.round_id, fixed("another plan").hex())
    ):  # fmt: skip
        with pytest.raises(CertificateError, match="signature of its round keys"):
            read_member(member, session, key, "plants")
    with pytest.raises(CertificateError, match="plants"):
        read_member(member, SESSION, key, "animals")
    with pytest.raises(CertificateError):
        read_member(member, SESSION, public_bytes(enrolled(0)[0]), "plants")
    with pytest.raises(CertificateError, match="revoked"):
        read_member(member, SESSION, key, "plants", Revoked(devices=frozenset({device.device_id})))
    for broken in (b"", member[:-1], member + b"\0", b"\x93" + member[1:-1], bytes(10_000)):
        with pytest.raises(MessageError):
            read_member(broken, SESSION, key, "plants")


def test_keys_that_give_no_secret() -> None:
    identity, chain = enrolled(0)
    good = Participant(make_terms(SIZES, ASSUMED, COUNT), identity, chain, public_bytes(ENROLMENT), stream("keys"))
    good.advertise()
    public = split_keys(good._state.keys)
    for changed, match in (
        ({"mask_key": public.cipher_key}, "must differ"),
        ({"mask_key": bytes(32)}, "small order"),
        ({"cipher_key": b"\x01" + bytes(31)}, "small order"),
    ):
        member = sign_member(SESSION, replace(public, **changed), chain, identity)
        with pytest.raises(SecureAggregationError, match=match):
            read_member(member, SESSION, public_bytes(ENROLMENT), "plants")


def test_one_device_at_two_places() -> None:
    run = make("draw")
    device = run.devices[0]
    # Twice the same member at neighbouring places of a tree that is otherwise fine.
    members = [run.roster.members[0], *[run.roster.members[1]] * (COUNT - 1)]
    doubled = Roster(members, SIZES)
    drawn = device.draw(doubled.invite(0))
    with pytest.raises(ConsistencyError, match="occurs twice"):
        device.deal(doubled.introduce(0, drawn))


def unknown_masks(run: NeighbourRound, known: set[int]) -> Any:
    """The incidence matrix [devices, masks] of the masks that a server with the mask keys of `known` does not know."""
    pairs = {
        tuple(sorted((place, other)))
        for place in range(COUNT)
        for other in run.roster.drawn[place, : run.terms.sizes.partners].tolist()
    }
    columns = [pair for pair in sorted(pairs) if not known & set(pair)]
    matrix = np.zeros((COUNT, len(columns)))
    for column, (one, other) in enumerate(columns):
        matrix[one, column], matrix[other, column] = -1, 1
    return matrix


def test_nothing_but_the_sum_can_be_computed_from_all_that_the_server_has() -> None:
    # The server has y = x + self masks + M m, knows all self masks at the end, and no m. A combination a of the rows
    # says something of x only where a M = 0: the left null space of M. It has one dimension, the sum of all.
    run = make("answer")
    run.answer(range(COUNT))
    matrix = unknown_masks(run, set())
    assert np.linalg.matrix_rank(matrix) == COUNT - 1
    np.testing.assert_allclose(np.ones(COUNT) @ matrix, 0)
    # Before the answers each row has a self mask of its own as well: nothing at all.
    before = np.concatenate([matrix, np.eye(COUNT)], axis=1)
    assert np.linalg.matrix_rank(before) == COUNT
    # One device is corrupt, and its masks known: then the sum of the others, and the corrupt one's own.
    known = unknown_masks(run, {3})
    assert np.linalg.matrix_rank(known) == COUNT - 2


def test_a_device_is_hidden_among_as_many_as_its_policy_says() -> None:
    # Whom the server may let seem gone without ending the round for the victim: as many as the threshold leaves. Each
    # choice of those, and one corrupt neighbour, leaves the victim with `hidden` others whose masks nobody knows.
    run = make("answer")
    neighbours = run.roster.drawn[0].tolist()
    for seeming in combinations(neighbours, SIZES.neighbours - SIZES.threshold):
        rest = [place for place in neighbours if place not in seeming]
        for corrupt in rest:
            answering = len(rest) - 1
            assert answering >= ASSUMED.hidden
            matrix = unknown_masks(run, {*seeming, corrupt})
            assert sum(matrix[0] != 0) >= ASSUMED.hidden
