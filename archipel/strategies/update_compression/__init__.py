"""Update compression: how `finish` packs what a device changed into fewer bits, and how the server takes it apart.

Every method is linear, so that the server unpacks the sum of the devices' updates and sees none of them.
"""

from archipel.protocol.noised.rotation import unrotate
from archipel.strategies.update_compression.low_rank import (
    basis_shapes,
    check_bases,
    first_bases,
    next_bases,
    split_bases,
)
from archipel.strategies.update_compression.unpacking import carried, round_seed, unpack_deltas

__all__ = [
    "basis_shapes", "carried", "check_bases", "first_bases", "next_bases", "round_seed", "split_bases", "unpack_deltas",
    "unrotate",
]  # fmt: skip
