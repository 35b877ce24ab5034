"""Sums of sites: what an edge server sends upward in place of a device's update.

All devices below a root encode their updates in the same fixed point, so the sum of a site is what its own secure round
gave: whole numbers, which the edge masks as they are. Nothing is decoded and encoded again, and nothing clipped twice.
So the root decodes the very sum that it would have had of all the devices at once, whatever the tree in between.

Behind the update's entries comes one more, with the number of devices in the sum. It is summed like the others: the
server above learns how many devices are in all sums together, and not how many in which.

| entry | one site's value |
|---|---|
| those of the devices' update | the sum over the site's devices, in steps |
| archipel/site-devices | how many devices they are |
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from archipel.errors import ProtocolError
from archipel.protocol.metrics.training_metrics import count_entry
from archipel.protocol.vector import Layout, Vector, check_vector

SITE_DEVICES = "archipel/site-devices"


def site_layout(layout: Layout) -> Layout:
    """The layout of sites' sums, of devices' updates in `layout`. Raises ProtocolError for an entry of that name."""
    if any(SITE_DEVICES in (port.name, port.tensor) for port in layout.updates):
        raise ProtocolError(f"the name {SITE_DEVICES!r} is not for programs to use")
    return replace(
        layout,
        updates=(*layout.updates, count_entry(SITE_DEVICES)),
        not_negative=layout.not_negative | {SITE_DEVICES},
    )


def device_layout(layout: Layout) -> Layout:
    """The layout of the devices' updates, of sites' sums in `layout`."""
    return replace(layout, updates=layout.updates[:-1], not_negative=layout.not_negative - {SITE_DEVICES})


def site_vector(signed: NDArray[np.int64], devices: int, modulus_bits: int) -> Vector:
    """What an edge masks.

    Arguments:
        signed: `[length]`, the sum of the devices' updates in whole steps, as Layout.signed_sum gives it.
        devices: how many they are.
        modulus_bits: b, from the plan of the round above.

    Returns:
        uint32 [length + 1], every entry below 2^b.

    Raises:
        ProtocolError: an entry has no place modulo 2^b.
    """
    entries = np.append(signed, np.int64(devices))
    half = 1 << (modulus_bits - 1)
    if not -half <= int(entries.min()) <= int(entries.max()) < half:
        raise ProtocolError(f"the sum of this site has entries beyond {modulus_bits} bits")
    return (entries & ((1 << modulus_bits) - 1)).astype(np.uint32)


def split_sites(
    total: Vector, layout: Layout, *, sites: int, smallest: int, largest: int, modulus_bits: int
) -> tuple[Vector, int]:
    """The sum of the devices' updates, `[length - 1]`, and how many devices are in it.

    Arguments:
        total: uint32 [length], the unmasked sum of the sites' vectors.
        layout: of the sites' sums.
        sites: how many are in it.
        smallest, largest: how many devices a site has.
        modulus_bits: b, from the plan.

    Raises:
        ProtocolError: so many sites cannot have so many devices; at least one of them sent something else.
    """
    check_vector("sum of sites", total, modulus_bits, layout.length)
    devices = int(total[-1])
    if not sites * smallest <= devices <= sites * largest:
        raise ProtocolError(
            f"sum of sites: {sites} sites count {devices} devices, and have from {sites * smallest} to "
            f"{sites * largest}; at least one of them sent something else than the sum of its devices"
        )
    return total[:-1], devices
