"""Sums of sites add up to the sum of all their devices, to the last bit, whatever the tree in between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.bundle.roles import Update
from archipel.errors import ProtocolError
from archipel.protocol.sites import SITE_DEVICES, device_layout, site_layout, site_vector, split_sites
from archipel.protocol.vector import Layout

LARGEST = 6


def layout(bits: int) -> Layout:
    shared = {"dtype": "float32", "weighting": "examples", "bits": bits}
    return Layout(
        (
            Update(name="dw", tensor="w", kind="delta", shape=(3,), range=4.0, clip=2.0, **shared),
            Update(name="n", tensor="weight", kind="weight", shape=(), range=4.0, lowest=0.01, **shared),
        )
    )


def update(rng: np.random.Generator) -> dict[str, np.ndarray]:
    weight = np.float32(rng.uniform(0.1, 4.0))
    step = rng.standard_normal(3).astype(np.float32)
    step *= np.float32(rng.uniform(0, 2.0)) / np.linalg.norm(step)
    return {"dw": (step * weight).astype(np.float32), "n": np.float32(weight)}


@given(
    sites=st.lists(st.integers(1, LARGEST), min_size=1, max_size=5),
    dropped=st.sets(st.integers(0, 29)),
    bits=st.sampled_from([4, 8, 16, 20]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_a_tree_decodes_what_all_its_devices_sum_to(sites: list[int], dropped: set[int], bits: int, seed: int) -> None:
    rng, flat = np.random.default_rng(seed), layout(bits)
    below = [[update(rng) for _ in range(count)] for count in sites]
    # Some devices of each site drop out of its round, but for one.
    below = [[each for place, each in enumerate(site) if place == 0 or place + 6 * at not in dropped]
             for at, site in enumerate(below)]  # fmt: skip
    b = flat.modulus_bits(LARGEST * len(sites))
    everyone = [each for site in below for each in site]
    at_once = sum(flat.encode(each, modulus_bits=b, max_cohort=LARGEST * len(sites)).astype(np.uint64)
                  for each in everyone)  # fmt: skip
    total = np.zeros(flat.length + 1, np.uint64)
    for site in below:
        own = flat.modulus_bits(LARGEST)
        summed = sum(flat.encode(each, modulus_bits=own, max_cohort=LARGEST).astype(np.uint64) for each in site)
        signed = flat.signed_sum((summed % 2**own).astype(np.uint32), cohort=len(site), modulus_bits=own)
        total += site_vector(signed, len(site), b)
    plain, devices = split_sites(
        (total % 2**b).astype(np.uint32), site_layout(flat), sites=len(sites), smallest=1, largest=LARGEST,
        modulus_bits=b,
    )  # fmt: skip
    assert devices == len(everyone)
    np.testing.assert_array_equal(plain, at_once % 2**b)
    one = flat.decode_sum(plain, cohort=devices, modulus_bits=b)
    other = flat.decode_sum((at_once % 2**b).astype(np.uint32), cohort=len(everyone), modulus_bits=b)
    np.testing.assert_array_equal(one.deltas["w"], other.deltas["w"])
    assert one.weight == other.weight


def test_the_layout_of_sites_has_one_entry_more_which_is_not_for_programs() -> None:
    flat = layout(8)
    sites = site_layout(flat)
    assert sites.length == flat.length + 1
    assert sites.updates[-1].name == SITE_DEVICES
    assert device_layout(sites) == flat
    with pytest.raises(ProtocolError, match=SITE_DEVICES):
        site_layout(sites)


def test_two_levels_of_sites_add_up() -> None:
    rng, flat, b = np.random.default_rng(3), layout(16), 32
    devices = [update(rng) for _ in range(8)]
    vectors = [flat.encode(each, modulus_bits=b, max_cohort=8).astype(np.int64) for each in devices]
    signed = [np.where(each >= 2**31, each - 2**32, each) for each in vectors]
    # Two edges of two edges of two devices.
    upper = []
    for edge in (0, 4):
        lower = [site_vector(signed[place] + signed[place + 1], 2, b) for place in (edge, edge + 2)]
        summed = (lower[0].astype(np.uint64) + lower[1]).astype(np.uint32)
        plain, count = split_sites(summed, site_layout(flat), sites=2, smallest=2, largest=2, modulus_bits=b)
        upper.append(site_vector(flat.signed_sum(plain, cohort=count, modulus_bits=b), count, b))
    summed = (upper[0].astype(np.uint64) + upper[1]).astype(np.uint32)
    plain, count = split_sites(summed, site_layout(flat), sites=2, smallest=4, largest=4, modulus_bits=b)
    assert count == 8
    np.testing.assert_array_equal(flat.signed_sum(plain, cohort=8, modulus_bits=b), sum(signed))


@pytest.mark.parametrize("devices", [1, 3, 13, 2**16])
def test_sites_that_count_more_or_fewer_devices_than_they_may_have_are_refused(devices: int) -> None:
    flat, b = layout(8), 24
    total = site_vector(np.zeros(flat.length, np.int64), devices, b)
    with pytest.raises(ProtocolError, match=f"2 sites count {devices} devices, and have from 4 to 12"):
        split_sites(total, site_layout(flat), sites=2, smallest=2, largest=6, modulus_bits=b)


def test_a_sum_beyond_the_modulus_is_refused() -> None:
    with pytest.raises(ProtocolError, match="beyond 16 bits"):
        site_vector(np.array([2**15]), 1, 16)
    assert site_vector(np.array([-(2**15), 2**15 - 1]), 1, 16).tolist() == [2**15, 2**15 - 1, 1]
