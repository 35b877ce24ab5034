"""What a device in a round over neighbours must refuse: lies of a server, of other devices, and garbled messages.

The device is the first of the round with a malicious server. It does the good steps before `step` and gets these
`messages` in place of the good ones; at `step` it must refuse with `error`. `introduced` says which member is shown in
place of one of the good ones, and with which proof. `sizes` are in place of the plan's, and `revoked` are devices and
tokens that its list of revocations has.
"""

from __future__ import annotations

from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from archipel.protocol import public_bytes, seal
from archipel.protocol.identity import read_chain, token_id
from archipel.protocol.messages import Chain, TokenCertificate
from archipel.protocol.messages.identity import RotationCertificate
from archipel.protocol.secagg_plus.envelope import DEALT_BYTES
from archipel.protocol.secagg_plus.inclusion import inclusion
from archipel.protocol.secagg_plus.member import RoundKeys, Session, sign_member
from archipel.protocol.secagg_plus.messages import Inbox, Inclusions, Neighbours, Question, pack
from protocol_vectors.inputs import Json, fixed, flip, signing_key
from protocol_vectors.neighbour_oddities import bad_envelopes, cohort_with, odd_spellings, packed, says
from protocol_vectors.neighbours import COUNT, NeighbourSession, chain_of
from protocol_vectors.round import ORDER_8

replace = msgspec.structs.replace
STRANGER = "stranger"


def neighbour_lies() -> Json:
    session = NeighbourSession("malicious")
    return {
        "failures": [
            {"name": name, "step": step, "error": error, **more}
            for step, make in (
                ("draw", _invitations), ("deal", _cohorts), ("deal", _garbled), ("receive", _inboxes),
                ("mask", _partners), ("confirm", _questions), ("answer", _answers),
            )
            for name, error, more in make(session)
        ],
        "accepted": [{"name": name, "step": step, **more} for name, step, more in odd_spellings(session)],
        "refused": bad_envelopes(session),
    }  # fmt: skip


Lie = tuple[str, str, Json]


def _invitations(session: NeighbourSession) -> list[Lie]:
    good = session.invitations[0]
    encoded = pack(good)

    def sized(**changes: Any) -> Json:
        return says(draw=pack(replace(good, **changes)))

    # The array, the size and the root, with something else in the place of the number of the place.
    start = encoded[:-1]
    return [
        ("fewer_than_the_threshold_needs", "ThresholdError", sized(size=6)),
        ("more_than_the_plan_allows", "ThresholdError", sized(size=COUNT + 1)),
        ("a_place_that_is_none", "ThresholdError", sized(place=COUNT)),
        ("two_devices", "MessageError", sized(size=2)),
        ("a_root_that_is_too_short", "MessageError", sized(root=good.root[1:])),
        ("a_byte_too_many", "MessageError", says(draw=encoded + b"\0")),
        ("a_byte_too_few", "MessageError", says(draw=start)),
        ("a_place_with_a_fraction", "MessageError", says(draw=start + bytes.fromhex("cb0000000000000000"))),
        ("a_place_below_zero", "MessageError", says(draw=start + b"\xff")),
        ("a_place_far_below_zero", "MessageError", says(draw=start + bytes.fromhex("d3ffffffffffffff00"))),
        ("a_place_beyond_2_to_the_53", "MessageError", says(draw=start + bytes.fromhex("cfffffffffffffffff"))),
        ("true_in_place_of_a_number", "MessageError", says(draw=start + b"\xc3")),
        ("nothing_in_place_of_a_number", "MessageError", says(draw=start + b"\xc0")),
        ("a_field_too_few", "MessageError", says(draw=b"\x92" + start[1:])),
        ("a_field_too_many", "MessageError", says(draw=b"\x94" + encoded[1:] + b"\0")),
        ("a_map", "MessageError", says(draw=b"\x83" + encoded[1:])),
        ("a_text_in_place_of_bytes", "MessageError", says(draw=b"\x93\x0a\xd9\x20" + encoded[4:])),
        ("nothing_at_all", "MessageError", says(draw=b"")),
        ("a_threshold_that_is_too_low", "PolicyError", {"messages": {}, "sizes": [8, 5, 8]}),
        ("too_few_partners", "PolicyError", {"messages": {}, "sizes": [8, 6, 7]}),
        ("so_few_neighbours_that_they_may_be_corrupt", "PolicyError", {"messages": {}, "sizes": [2, 2, 2]}),
        ("a_threshold_above_the_neighbours", "PolicyError", {"messages": {}, "sizes": [8, 9, 8]}),
    ]


def _cohorts(session: NeighbourSession) -> list[Lie]:
    """Cohorts with another member at one of the places that the device drew."""
    session_, other = session.terms.session, session.drawn[0].places[0]
    second = session.drawn[0].places[1]
    good = [session.roster.keys[place] for place in range(COUNT)]
    own, theirs = good[0], good[second]

    cohort = cohort_with(session, other)

    def member(
        name: str = STRANGER, *, names: Session = session_, by: str = "", chain: Any = None, **keys: Any
    ) -> Json:
        made = RoundKeys(**{"cipher_key": good[other].cipher_key, "mask_key": good[other].mask_key,
                            "seed_digest": bytes(32), **keys})  # fmt: skip
        return cohort(sign_member(names, made, chain or chain_of(name), signing_key(by or name)))

    high_bit = bytes.fromhex(ORDER_8)[:-1] + bytes([bytes.fromhex(ORDER_8)[-1] | 128])
    raw = msgspec.msgpack.decode(session.members[other])
    own_again = sign_member(session_, replace_keys(own, mask_key=X25519_PUBLIC), session.chains[0], _key(session, 0))
    revoked = {"devices": [session.devices[other].device_id], "tokens": []}
    token = msgspec.json.decode(session.chains[other].token.body, type=TokenCertificate)
    by_token = {"devices": [], "tokens": [token_id(token.token_key)]}
    twice = "ConsistencyError"
    return [
        ("another_root", "ConsistencyError", says(draw=pack(replace(session.invitations[0], root=bytes(32))))),
        ("another_size", "ConsistencyError", _smaller(session)),
        ("not_enrolled", "CertificateError", member(chain=chain_of(STRANGER, enrolment="somebody"))),
        ("of_another_population", "CertificateError", member(chain=chain_of(STRANGER, population="staff"))),
        ("an_aggregator", "ConsistencyError", member(chain=chain_of(STRANGER, kind="aggregator"))),
        ("keys_that_another_device_signed", "CertificateError", member(by="somebody")),
        ("keys_of_another_round", "CertificateError",
         member(names=Session(fixed("another round", 16).hex(), session_.plan))),
        ("keys_for_another_plan", "CertificateError",
         member(names=Session(session_.round_id, fixed("another plan").hex()))),
        ("the_cipher_key_is_the_mask_key", "SecureAggregationError", member(mask_key=good[other].cipher_key)),
        ("a_mask_key_of_order_1", "SecureAggregationError", member(mask_key=b"\1" + bytes(31))),
        ("a_cipher_key_of_order_8", "SecureAggregationError", member(cipher_key=bytes.fromhex(ORDER_8))),
        ("a_mask_key_of_order_8_with_the_highest_bit", "SecureAggregationError", member(mask_key=high_bit)),
        ("a_device_twice", twice, cohort(session.members[second])),
        ("a_device_twice_with_another_token_and_key", twice,
         member(by="replaced", chain=rotated(chain_of(session.names[second], token="more"), session.names[second]))),
        ("a_device_key_twice", twice,
         member(by=session.names[second], chain=rotated(chain_of(STRANGER), STRANGER, session.names[second]))),
        ("a_token_twice", twice, member(chain=chain_of(STRANGER, token=session.names[second]))),
        ("the_mask_key_of_another", twice, member(mask_key=theirs.mask_key)),
        ("the_cipher_key_of_another_as_mask_key", twice, member(mask_key=theirs.cipher_key)),
        ("the_device_s_own_mask_key", twice, member(mask_key=own.mask_key)),
        ("a_revoked_device", "CertificateError", {"messages": {}, "revoked": revoked}),
        ("a_revoked_token", "CertificateError", {"messages": {}, "revoked": by_token}),
        ("the_device_itself_with_other_keys", "ConsistencyError", cohort_with(session, 0)(own_again)),
        ("an_unknown_field", "MessageError", cohort(packed([{**raw[0], "spy": b""}, *raw[1:]]))),
        ("a_field_missing", "MessageError", cohort(packed([{"token": raw[0]["token"]}, *raw[1:]]))),
        ("names_as_bytes", "MessageError", cohort(packed([{k.encode(): v for k, v in raw[0].items()}, *raw[1:]]))),
        ("null_in_place_of_rotations", "MessageError", cohort(packed([{**raw[0], "rotations": None}, *raw[1:]]))),
        ("too_many_rotations", "MessageError",
         cohort(packed([{**raw[0], "rotations": [raw[0]["token"]] * 9}, *raw[1:]]))),
        ("a_rotation_of_nobody", "CertificateError",
         cohort(packed([{**raw[0], "rotations": [raw[0]["token"]]}, *raw[1:]]))),
        ("a_key_too_short", "MessageError", cohort(packed([raw[0], raw[1][1:], raw[2]]))),
        ("a_signature_too_long", "MessageError", cohort(packed([*raw[:2], raw[2] + b"\0"]))),
        ("a_member_with_a_byte_too_many", "MessageError", cohort(session.members[other] + b"\0")),
    ]  # fmt: skip


def _smaller(session: NeighbourSession) -> Json:
    """The size is a part of the root: the same members cannot be passed off as another cohort."""
    # Where the tree has as many levels the draw is another one, so the members at its places are shown.
    invitation = replace(session.invitations[0], size=COUNT - 1)
    stream = type(session.streams[0])(session.streams[0].name)
    device = session.device(int(session.names[0].split()[1]), stream)
    device.advertise()
    drawn = device.draw(invitation)
    return says(draw=pack(invitation), deal=pack(session.roster.introduce(0, drawn)))


def _garbled(session: NeighbourSession) -> list[Lie]:
    good = session.introduced[0]
    unused = next(p for p in range(1, COUNT) if p not in session.drawn[0].places)

    def told(members: list[bytes] = good.members, proof: bytes = good.proof) -> Json:
        return says(deal=pack(Neighbours(members=members, proof=proof)))

    return [
        ("another_member_at_a_drawn_place", "ConsistencyError",
         told(members=[session.members[unused], *good.members[1:]])),
        ("two_places_swapped", "ConsistencyError", told([good.members[1], good.members[0], *good.members[2:]])),
        ("one_member_too_few", "ConsistencyError", told(members=good.members[1:])),
        ("one_member_too_many", "ConsistencyError", told(members=[*good.members, good.members[0]])),
        ("a_proof_too_short", "ConsistencyError", told(proof=good.proof[32:])),
        ("a_proof_too_long", "ConsistencyError", told(proof=good.proof + bytes(32))),
        ("a_proof_of_broken_hashes", "ConsistencyError", told(proof=good.proof[:-1])),
        ("a_proof_of_something_else", "ConsistencyError", told(proof=flip(good.proof))),
        ("a_member_that_is_too_large", "MessageError", told(members=[bytes(8193), *good.members[1:]])),
        ("more_members_than_bytes", "MessageError", says(deal=b"\x92\xdd\x00\x00\xff\xff")),
        ("more_bytes_than_there_are", "MessageError", says(deal=b"\x92\x91\xc5\x1f\xff\x00")),
    ]  # fmt: skip


def _inboxes(session: NeighbourSession) -> list[Lie]:
    good = session.inboxes[0]
    key, dealt = good.cipher_keys[:32], good.dealt[:DEALT_BYTES]

    def named(*dealers: int) -> Json:
        """The first dealer's envelope under these names."""
        count = len(dealers)
        return says(
            receive=pack(
                Inbox(
                    dealers=dealers, positions=good.positions[:1] * count, cipher_keys=key * count, dealt=dealt * count
                )
            )
        )

    def columns(**changes: Any) -> Json:
        values = {name: getattr(good, name) for name in ("dealers", "positions", "cipher_keys", "dealt")}
        return says(receive=packed(list((values | changes).values())))

    first, second = good.dealers[:2]
    return [
        ("a_dealer_twice", "ShareError", named(first, first)),
        ("a_refused_dealer_twice", "ShareError", named(second, second)),
        ("the_device_as_its_own_dealer", "ShareError", named(0)),
        ("a_dealer_that_is_not_in_the_cohort", "ShareError", named(COUNT)),
        ("a_position_too_few", "MessageError", columns(positions=good.positions[1:])),
        ("a_cipher_key_too_few", "MessageError", columns(cipher_keys=good.cipher_keys[32:])),
        ("an_envelope_a_byte_too_short", "MessageError", columns(dealt=good.dealt[:-1])),
        ("a_position_of_zero", "MessageError", columns(positions=[0, *good.positions[1:]])),
        ("a_dealer_beyond_all_cohorts", "MessageError", columns(dealers=[1 << 16, *good.dealers[1:]])),
    ]


def _partners(session: NeighbourSession) -> list[Lie]:
    drawn = session.drawn[0].places
    good = session.partners[0]
    stranger = next(p for p in range(1, COUNT) if p not in drawn)
    one_sided = [other for other in good.others if other not in drawn]

    def told(gone: list[int], others: list[int], mask_keys: bytes) -> Json:
        return says(mask=packed([gone, others, mask_keys]))

    key = session.roster.keys[stranger].mask_key
    assert one_sided == [stranger]
    return [
        ("too_many_gone", "ThresholdError", told(drawn[:3], [], b"")),
        ("all_gone", "ThresholdError", told(drawn, [], b"")),
        ("somebody_gone_whom_the_device_did_not_draw", "ConsistencyError", told([stranger], [], b"")),
        ("the_device_itself_gone", "ConsistencyError", told([0], [], b"")),
        ("the_device_as_its_own_partner", "ConsistencyError", told([], [0], key)),
        ("a_partner_twice", "ConsistencyError", told([], [stranger] * 2, key * 2)),
        ("a_partner_with_a_key_of_order_8", "SecureAggregationError", told([], [stranger], bytes.fromhex(ORDER_8))),
        ("a_mask_key_too_many", "MessageError", told([], [stranger], key * 2)),
    ]


def _questions(session: NeighbourSession) -> list[Lie]:
    good = session.questions[0]
    held = {*good.present, *good.left}
    foreign = next(place for place in range(COUNT) if place not in held)

    def asked(present: list[int], left: list[int]) -> Json:
        return says(confirm=pack(Question(present=present, left=left)))

    return [
        ("both_shares_of_a_device", "ConsistencyError", asked(good.present, [*good.left, good.present[0]])),
        ("a_share_twice", "ConsistencyError", asked([*good.present, good.present[0]], good.left)),
        ("shares_that_the_device_does_not_hold", "ConsistencyError", asked([*good.present, foreign], good.left)),
        ("shares_that_the_device_refused", "ConsistencyError", asked([*good.present, session.garbled], good.left)),
        ("its_own", "ConsistencyError", asked(good.present, [*good.left, 0])),
    ]


def _answers(session: NeighbourSession) -> list[Lie]:
    good, question = session.inclusions[0], session.questions[0]
    signatures = [good.signatures[start : start + 64] for start in range(0, len(good.signatures), 64)]
    both = list(zip(good.neighbours, signatures, strict=True))
    threshold = session.terms.sizes.threshold
    bound = bytes(session.terms.session) + session.roster.root
    stranger = next(p for p in range(1, COUNT) if p not in session.drawn[0].places)
    by_stranger = _key(session, stranger).sign(inclusion(bound, 0, stranger))
    of_another = [(p, _key(session, p).sign(inclusion(bound, 1, p))) for p, _ in both]

    def told(said: list[tuple[int, bytes]], **more: bytes) -> Json:
        message = Inclusions(neighbours=[p for p, _ in said], signatures=b"".join(made for _, made in said))
        return says(answer=pack(message), **more)

    moved = Question(present=question.present[1:], left=[*question.left, question.present[0]])
    reordered = Question(present=question.present[::-1], left=question.left)
    forged = [*both[: threshold - 1], *[(place, bytes(64)) for place, _ in both[threshold - 1 :]]]
    return [
        ("too_few_say_that_it_is_present", "ThresholdError", told(both[: threshold - 1])),
        ("nobody_says_that_it_is_present", "ThresholdError", told([])),
        ("forged_signatures", "ThresholdError", told(forged)),
        ("signatures_about_another_device", "ThresholdError", told(of_another)),
        ("one_signature_under_all_names", "ThresholdError", told([(p, both[0][1]) for p, _ in both])),
        ("one_neighbour_many_times", "ConsistencyError", told([both[0]] * threshold)),
        ("somebody_whom_the_device_did_not_draw", "ConsistencyError", told([*both, (stranger, by_stranger)])),
        ("a_signature_too_few", "MessageError", says(answer=packed([good.neighbours, good.signatures[64:]]))),
        ("another_question", "ConsistencyError", told(both, question=pack(moved))),
        ("the_question_in_another_order", "ConsistencyError", told(both, question=pack(reordered))),
    ]


X25519_PUBLIC = X25519PrivateKey.from_private_bytes(fixed("another attempt")).public_key().public_bytes_raw()


def replace_keys(keys: RoundKeys, **changes: bytes) -> RoundKeys:
    return RoundKeys(**{"cipher_key": keys.cipher_key, "mask_key": keys.mask_key, "seed_digest": keys.seed_digest}
                     | changes)  # fmt: skip


def rotated(chain: Chain, name: str, to: str = "replaced") -> Chain:
    """The chain of the device with this name, which has replaced its key by that of another name."""
    key = public_bytes(signing_key(to))
    certificate = RotationCertificate(device=read_chain(chain)[0], number=1, device_key=key)
    return replace(chain, rotations=[seal("rotation", certificate, signing_key(name))])


def _key(session: NeighbourSession, place: int) -> Any:
    return signing_key(session.names[place])
