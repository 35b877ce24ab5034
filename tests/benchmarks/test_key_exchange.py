"""The bytes of ML-KEM-768 in docs/protocol-choices.md, and that both devices of a pair give its mask's key."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC, CIPHERTEXT = 1184, 1088
"""FIPS 203, table 3."""


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("cryptography.hazmat.primitives.asymmetric.mlkem", reason="this cryptography has no ML-KEM")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import key_exchange

    return key_exchange


def numbers(page: str, start: str) -> list[list[int]]:
    """The numbers in each row of a table that begins with the cells `start`."""
    rows = re.findall(rf"^\| ([\d,]+) \| {start} \| (.*) \|$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M)
    return [[int(cell.replace(",", "")) for cell in (devices, *cells.split(" | "))] for devices, cells in rows]


@pytest.mark.parametrize("server", ["semi-honest", "malicious"])
def test_the_page_states_the_bytes_of_the_sizes_in_the_protocol(exchange: ModuleType, server: str) -> None:
    sealed = 32 + 16
    expected = []
    for devices, neighbours, _, partners in numbers("protocol.md", server):
        envelopes = PUBLIC + neighbours * CIPHERTEXT, neighbours * (PUBLIC + CIPHERTEXT)
        masks = (
            PUBLIC + partners * (CIPHERTEXT + sealed + exchange.COMMITMENT_BYTES),
            partners * (PUBLIC + CIPHERTEXT + exchange.COMMITMENT_BYTES),
        )
        added = [
            exchange.for_envelopes(neighbours, PUBLIC, CIPHERTEXT),
            exchange.for_masks(partners, PUBLIC, CIPHERTEXT, sealed),
        ]
        assert [(item.sent, item.received) for item in added] == [envelopes, masks]
        expected.append([devices, *envelopes, *(a + b for a, b in zip(envelopes, masks))])
    assert len(expected) == 2
    assert numbers("protocol-choices.md", server) == expected


def test_a_masks_key_is_found_from_the_secret_of_either_device(exchange: ModuleType) -> None:
    assert exchange.wrap_and_recover() == 32 + 16
    secret = bytes(range(32))
    public = exchange.from_secret(secret).public_key().public_bytes_raw()
    assert len(public) == PUBLIC
    assert public == exchange.from_secret(secret).public_key().public_bytes_raw()
    assert public != exchange.from_secret(secret[::-1]).public_key().public_bytes_raw()
    assert len(exchange.from_secret(secret).public_key().encapsulate()[1]) == CIPHERTEXT
