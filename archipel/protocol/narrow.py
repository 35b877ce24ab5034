"""Masked vectors whose entries take only the bits that their own sums need.

A masked entry is a number modulo 2^b. Its low bits are masked by the low bits of the masks, and of a sum of such
numbers the low k bits are the sum of their low k bits. So an entry whose sum fits k bits may travel as its low k bits,
whatever the other entries need: with updates of 4 bits and 10 devices that is 8 bits, where one entry with the weight
has the whole vector take 16 or 24.

On the wire, an entry of k bits takes k bits, the low ones first, and each update port begins with a new byte. Any bytes
of the right length are a vector: what is left over of a port's last byte is not read.
"""

from __future__ import annotations

import numpy as np

from archipel.errors import MessageError
from archipel.protocol.bits import pack_bits, packed_size, unpack_bits
from archipel.protocol.messages import RoundPlan
from archipel.protocol.vector import Layout, Vector, check_vector, pack, unpack


def masked_size(layout: Layout, max_cohort: int, modulus_bits: int, *, narrow: bool) -> int:
    """Bytes of a masked vector on the wire; `max_cohort` is how many devices' updates its sum may be of."""
    if not narrow:
        return layout.length * -(-modulus_bits // 8)
    return sum(packed_size(count, bits) for count, bits in layout.widths(max_cohort))


def pack_masked(layout: Layout, vector: Vector, plan: RoundPlan) -> bytes:
    """The bytes of a masked vector of the plan's round. Raises ProtocolError for a wrong vector."""
    if not plan.narrow:
        return pack(vector, plan.modulus_bits)
    check_vector("vector", vector, plan.modulus_bits, layout.length)
    parts, start = [], 0
    for count, bits in layout.widths(plan.max_cohort * plan.site):
        parts.append(pack_bits(vector[start : start + count], bits))
        start += count
    return b"".join(parts)


def unpack_masked(layout: Layout, data: bytes, plan: RoundPlan) -> Vector:
    """The vector, uint32 [length], of which each entry has its low bits. Raises MessageError for wrong bytes."""
    if not plan.narrow:
        return unpack(data, layout.length, plan.modulus_bits)
    size = masked_size(layout, plan.max_cohort * plan.site, plan.modulus_bits, narrow=True)
    # Before anything is made of the bytes.
    if len(data) != size:
        raise MessageError(f"vector: expected {layout.length} entries in {size} bytes, got {len(data)}")
    raw, start = np.frombuffer(data, np.uint8), 0
    parts = []
    for count, bits in layout.widths(plan.max_cohort * plan.site):
        stop = start + packed_size(count, bits)
        parts.append(unpack_bits(raw[start:stop], count, bits))
        start = stop
    return np.concatenate(parts)


def reduce_sum(layout: Layout, total: Vector, plan: RoundPlan) -> Vector:
    """The sum modulo 2^b of signed numbers, from one whose entries have only their low bits right."""
    if not plan.narrow:
        return total
    parts, start = [], 0
    for count, bits in layout.widths(plan.max_cohort * plan.site):
        unused = np.uint32(32 - bits)
        # Up and down again as a signed number: the top bit that is right becomes the sign.
        signed = (total[start : start + count] << unused).view(np.int32) >> np.int32(unused)
        parts.append(signed.view(np.uint32) & np.uint32(2**plan.modulus_bits - 1))
        start += count
    return np.concatenate(parts)
