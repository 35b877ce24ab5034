"""With whom a device shares masks once it knows who is still there."""

from __future__ import annotations

from dataclasses import dataclass

from archipel.errors import ConsistencyError, ThresholdError
from archipel.protocol.secagg.keys import KEY_BYTES
from archipel.protocol.secagg_plus.envelope import divide
from archipel.protocol.secagg_plus.messages import Partners
from archipel.protocol.secagg_plus.state import State


@dataclass(frozen=True)
class Link:
    """A mask that a device shares with the one at `place`: the other's X25519 mask key, the part that the two alone
    know, and whether the device drew the other."""

    place: int
    public: bytes
    part: bytes
    drew: bool


def find_links(partners: Partners, state: State, own_place: int, needed: int, by_draw: bool) -> list[Link]:
    """Every mask that the device at `own_place` shares with somebody.

    Arguments:
        partners: what the server says.
        state: what the device remembers.
        needed: how many of the partners that it drew must be there, if it drew so many.
        by_draw: as of `KeyAgreement`.

    Raises ConsistencyError for what no honest server says, ThresholdError where too few are there.
    """
    gone = set(partners.gone)
    if not gone <= set(state.mask_keys):
        raise ConsistencyError("partners: the server says that somebody left whom this device did not draw")
    own = {place: key for place, key in state.mask_keys.items() if place not in gone}
    drawn = len(state.mask_keys)
    if len(own) < min(needed, drawn):
        raise ThresholdError(f"partners: {len(own)} of {drawn} are still there, {needed} are needed to hide a vector")
    mask_keys = divide("partners", partners.mask_keys, KEY_BYTES, len(partners.others))
    others = dict(zip(partners.others, mask_keys, strict=True))
    if own_place in others or len(others) != len(partners.others):
        raise ConsistencyError("partners: this device itself, or somebody twice")
    if not by_draw:
        # A pair that drew each other shares one mask, with the key that this device has verified.
        return [Link(place, key, b"", place in own) for place, key in {**others, **own}.items()]
    if not set(others) <= set(state.heard):
        raise ConsistencyError("partners: somebody from whom this device has accepted nothing for a mask")
    links = [Link(place, own.get(place, key), state.heard[place], False) for place, key in others.items()]
    return links + [Link(place, key, state.parts[place], True) for place, key in own.items()]
