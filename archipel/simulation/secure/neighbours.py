"""A round over neighbours that is really carried out, for the whole cohort in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.protocol import add_masked
from archipel.protocol.identity import VerifiedDevice
from archipel.protocol.messages import Chain, RoundPlan
from archipel.protocol.narrow import pack_masked, reduce_sum, unpack_masked
from archipel.protocol.secagg_plus.member import RoundKeys
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.roster import Roster, check_answer
from archipel.protocol.secagg_plus.terms import Terms
from archipel.protocol.secagg_plus.unmask import unmask_sum
from archipel.protocol.vector import Layout, Vector

Identity = tuple[Ed25519PrivateKey, Chain]


class _Device(Participant):
    """A device that takes over what another one of this process found when it verified a member of the same round."""

    known: dict[bytes, tuple[VerifiedDevice, RoundKeys]]

    def _read(self, member: bytes, full: bool) -> tuple[VerifiedDevice, RoundKeys]:
        if member not in self.known:
            self.known[member] = super()._read(member, full)
        return self.known[member]


def add_over_neighbours(
    vectors: Mapping[int, Vector],
    dropped: Sequence[int],
    *,
    terms: Terms,
    plan: RoundPlan,
    layout: Layout,
    identity: Callable[[int], Identity],
    enrolment_key: bytes,
) -> Vector:
    """The sum of the clients' vectors, each masked by its device, taken out of the masked sum by the shares of others.

    Arguments:
        vectors: by client, uint32 [length], below 2^modulus_bits of the plan.
        dropped: clients that deal and open envelopes, and whose vectors never come.
        terms, plan, layout: of the round.
        identity: gives each client's key, and its chain from `enrolment_key`.

    Raises ProtocolError where the round fails, such as a ThresholdError with too many dropped.
    """
    known: dict[bytes, tuple[VerifiedDevice, RoundKeys]] = {}
    made: list[tuple[_Device, int]] = []
    for client in [*vectors, *dropped]:
        device = _Device(terms, *identity(client), enrolment_key, secrets.token_bytes)
        device.known = known
        made.append((device, client))
    made.sort(key=lambda pair: pair[0].device_id)
    devices, place_of = [device for device, _ in made], {client: place for place, (_, client) in enumerate(made)}
    roster = Roster([device.advertise() for device in devices], terms.sizes, terms.agreement)
    for place, device in enumerate(devices):
        drawn = device.draw(roster.invite(place))
        roster.take(place, device.deal(roster.introduce(place, drawn)))
    sharers = roster.settle({place: device.receive(roster.inbox(place)) for place, device in enumerate(devices)})
    total = np.zeros(layout.length, np.uint32)
    for client, vector in vectors.items():
        place = place_of[client]
        data = pack_masked(layout, devices[place].mask(vector, roster.pair(place, sharers)), plan)
        add_masked(total, unpack_masked(layout, data, plan), plan.modulus_bits)
    survivors = {place_of[client] for client in vectors}
    questions = {place: roster.ask(place, survivors) for place in survivors}
    confirmed = {place: devices[place].confirm(question) for place, question in questions.items()}
    answers = {
        place: devices[place].answer(question, roster.include(place, questions, confirmed))
        for place, question in questions.items()
    }
    for place, answer in answers.items():
        check_answer(questions[place], answer, devices[place].device_id)
    found = unmask_sum(
        total, session=terms.session, roster=roster, sharers=sharers, survivors=survivors, questions=questions,
        answers=answers, modulus_bits=plan.modulus_bits,
    )  # fmt: skip
    return reduce_sum(layout, found, plan)
