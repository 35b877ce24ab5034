"""Odd messages of a round over neighbours that a device takes: other spellings, and inboxes with bad envelopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from archipel.protocol.secagg_plus.envelope import DEALT_BYTES, ENVELOPE_BYTES, commit_pair, envelope_key, seal
from archipel.protocol.secagg_plus.messages import Inbox, pack
from archipel.protocol.secagg_plus.shares import split
from archipel.protocol.secagg_plus.tree import MemberTree, hash_member
from protocol_vectors.inputs import Json, fixed, flip
from protocol_vectors.neighbours import NeighbourSession
from protocol_vectors.round import ORDER_8

replace = msgspec.structs.replace


def says(**messages: bytes) -> Json:
    return {"messages": {step: message.hex() for step, message in messages.items()}}


def cohort_with(session: NeighbourSession, place: int) -> Callable[[bytes], Json]:
    """What the device is told of the cohort with another member at this place, which it drew or is its own."""

    def told(member: bytes) -> Json:
        members = [*session.members]
        members[place] = member
        tree = MemberTree([hash_member(each) for each in members])
        shown = [*session.drawn[0].places, 0]
        invitation = replace(session.invitations[0], root=tree.root)
        introduced = {"index": shown.index(place), "member": member.hex(), "proof": tree.prove(shown).hex()}
        return {**says(draw=pack(invitation)), "introduced": introduced}

    return told


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def odd_spellings(session: NeighbourSession) -> list[tuple[str, str, Json]]:
    """What all readers take alike: a member that only some of them took would end the round for its neighbours."""
    invitation = pack(session.invitations[0])
    start, question = invitation[:-1], session.questions[0]
    other = session.drawn[0].places[0]
    chain, keys, signature = msgspec.msgpack.decode(session.members[other])
    rest = packed([keys, signature])[1:]
    fields = {name: packed(name) + packed(value) for name, value in chain.items()}
    wide = b"\xdb" + len("token").to_bytes(4, "big") + b"token" + packed(chain["token"])
    wrong = packed("token") + packed({"body": b"", "signature": b""})
    cohort = cohort_with(session, other)
    # Pairs that drew each other keep the key that the device has verified, so what it masks is the same.
    partners = session.partners[0]
    keys_of_others = (
        fixed("forged") if place in session.drawn[0].places else session.roster.keys[place].mask_key
        for place in partners.others
    )
    forged = b"".join(keys_of_others)
    assert forged != partners.mask_keys
    return [
        ("a_number_of_two_bytes", "draw", says(draw=start + b"\xcc\0")),
        ("a_number_of_nine_bytes", "draw", says(draw=start + b"\xcf" + bytes(8))),
        ("a_signed_number", "draw", says(draw=start + b"\xd1\0\0")),
        ("a_signed_number_of_nine_bytes", "draw", says(draw=start + b"\xd3" + bytes(8))),
        ("a_list_of_four_bytes", "confirm", says(confirm=b"\xdd\0\0\0\2" + packed([*question.present])
                                                 + packed([*question.left]))),
        ("bytes_of_four_bytes", "draw", says(draw=b"\x93\x0a\xc6\0\0\0\x20" + invitation[4:])),
        ("another_key_of_a_verified_partner", "mask", says(mask=packed([partners.gone, partners.others, forged]))),
        ("a_map_of_two_bytes", "deal", cohort(b"\x93\xde\0\2" + b"".join(fields.values()) + rest)),
        ("a_map_of_four_bytes", "deal", cohort(b"\x93\xdf\0\0\0\2" + b"".join(fields.values()) + rest)),
        ("fields_in_another_order", "deal", cohort(b"\x93\x82" + fields["identity"] + fields["token"] + rest)),
        ("a_name_of_four_bytes", "deal", cohort(b"\x93\x82" + wide + fields["identity"] + rest)),
        ("a_field_twice", "deal", cohort(b"\x93\x83" + wrong + b"".join(fields.values()) + rest)),
        ("no_rotations", "deal", cohort(packed([{**chain, "rotations": []}, keys, signature]))),
    ]  # fmt: skip


def bad_envelopes(session: NeighbourSession) -> list[Json]:
    """Inboxes whose bad envelopes the device names, and does not keep."""
    good = session.inboxes[0]
    always = session.refused[0].dealers

    def changed(index: int, **column: bytes | int) -> Json:
        values: dict[str, Any] = {
            "positions": [*good.positions],
            "cipher_keys": [good.cipher_keys[32 * i : 32 * (i + 1)] for i in range(len(good.dealers))],
            "dealt": [good.dealt[DEALT_BYTES * i : DEALT_BYTES * (i + 1)] for i in range(len(good.dealers))],
        }
        for name, value in column.items():
            values[name][index] = value
        message = Inbox(
            dealers=good.dealers, positions=values["positions"], cipher_keys=b"".join(values["cipher_keys"]),
            dealt=b"".join(values["dealt"]),
        )  # fmt: skip
        return {"inbox": pack(message).hex(), "refused": sorted({*always, good.dealers[index]})}

    dealer, dealt = good.dealers[0], good.dealt[:DEALT_BYTES]
    swapped = msgspec.structs.replace(good, dealers=[good.dealers[1], good.dealers[0], *good.dealers[2:]])
    position = good.positions[0]

    def sealed(pair: tuple[bytes, bytes], commitments: bytes | None = None) -> bytes:
        """An envelope that the dealer really sealed."""
        bound = bytes(session.terms.session) + session.roster.root
        theirs, own = session.roster.keys[dealer], session.roster.keys[0]
        # Drawn first: what its cipher key is made of.
        private = X25519PrivateKey.from_private_bytes(fixed(session.streams[dealer].name, 32))
        salt = session.terms.session.salt
        key = envelope_key(private, own.cipher_key, salt, theirs.cipher_key, own.cipher_key)
        envelope = seal(key, bound, dealer, 0, pair, lambda count: fixed("nonce", count))
        return envelope + (commitments or commit_pair(bound, dealer, position, pair))

    one, two = split(fixed("one"), 1, 1, fixed_draw)[0], split(fixed("two"), 1, 1, fixed_draw)[0]
    beyond = (2**31 - 1).to_bytes(4, "little") + one[4:]
    named = {
        "a_garbled_envelope": changed(0, dealt=flip(dealt[:ENVELOPE_BYTES]) + dealt[ENVELOPE_BYTES:]),
        "garbled_commitments": changed(0, dealt=flip(dealt)),
        "another_position": changed(0, positions=position + 1),
        "another_cipher_key": changed(0, cipher_keys=good.cipher_keys[32:64]),
        "a_cipher_key_of_order_8": changed(0, cipher_keys=bytes.fromhex(ORDER_8)),
        "commitments_to_the_shares_swapped": changed(0, dealt=sealed((one, two), sealed((two, one))[ENVELOPE_BYTES:])),
        "a_share_above_the_field": changed(0, dealt=sealed((beyond, two))),
        "the_other_share_above_the_field": changed(0, dealt=sealed((one, beyond))),
        "dealers_swapped": {
            "inbox": pack(swapped).hex(), "refused": sorted({*always, *good.dealers[:2]}),
        },
    }  # fmt: skip
    return [{"name": name, **case} for name, case in named.items()]


def fixed_draw(count: int) -> bytes:
    return fixed("draw", count)
