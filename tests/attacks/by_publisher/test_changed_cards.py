"""Somebody who carries a bundle changes its model card: claims a better accuracy or another licence, or hides escape
sequences in it, so that a terminal that shows the card does something else.

The attacker has the bundle's files, and no publisher's key. What stops it: the manifest has the card's digest, and the
publisher signed the manifest; a card's texts have printable characters alone, and nobody shows one before it is
decoded.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.errors import DigestError, SignatureError, UnsafePathError
from archipel.lite_runtime import load
from tests.support.commands import Command
from tests.support.fixtures.commands import archipel  # noqa: F401
from tests.support.tiny_bundle import make_bundle

CARD = b.ModelCard(
    name="tiny", description="Three classes.", task="classification", licence="CC-BY-NC-4.0",
    metrics=(b.CardMetric(name="accuracy", value=0.71, data="held out", examples=100),),
)  # fmt: skip


@pytest.fixture
def publisher() -> Ed25519PrivateKey:
    return b.generate_key()


@pytest.fixture
def trusted(publisher: Ed25519PrivateKey) -> list[bytes]:
    return [publisher.public_key().public_bytes_raw()]


@pytest.fixture
def folder(tmp_path: Path, publisher: Ed25519PrivateKey) -> Path:
    make_bundle(tmp_path, publisher, card=CARD)
    return tmp_path / "tiny"


def resign(folder: Path, key: Ed25519PrivateKey | None = None) -> None:
    """Brings the manifest's digest of the card up to date, with another's signature or the old one."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"]["card.json"] = hashlib.sha256((folder / "card.json").read_bytes()).hexdigest()
    data = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    (folder / "manifest.json").write_bytes(data)
    if key is not None:
        (folder / "manifest.sig").write_bytes(key.sign(data))


def test_as_it_was_published(folder: Path, trusted: list[bytes]) -> None:
    assert b.open_bundle(folder, trusted).card == CARD


@pytest.mark.parametrize(("old", "new"), [(b"0.71", b"0.99"), (b"CC-BY-NC-4.0", b"Apache-2.0  ")])
def test_another_claim(folder: Path, trusted: list[bytes], tmp_path: Path, old: bytes, new: bytes) -> None:
    file = folder / "card.json"
    changed = file.read_bytes().replace(old, new)
    assert changed != file.read_bytes()
    file.write_bytes(changed)
    b.pack(folder, tmp_path / "changed.bundle")
    for place in (folder, tmp_path / "changed.bundle"):
        with pytest.raises(DigestError, match=r"card\.json"):
            load(place, trusted, cache=tmp_path / "cache")
    for key in (None, b.generate_key()):
        resign(folder, key)
        with pytest.raises(SignatureError):
            load(folder, trusted)


def test_a_card_is_added_or_taken_away(
    folder: Path, trusted: list[bytes], tmp_path: Path, publisher: Ed25519PrivateKey
) -> None:
    card = (folder / "card.json").read_bytes()
    (folder / "card.json").unlink()
    with pytest.raises(DigestError, match=r"card\.json: cannot be read"):
        load(folder, trusted)
    (tmp_path / "other").mkdir()
    make_bundle(tmp_path / "other", publisher)
    (tmp_path / "other" / "tiny" / "card.json").write_bytes(card)
    with pytest.raises(UnsafePathError, match=r"'card\.json' is not in the manifest"):
        load(tmp_path / "other" / "tiny", trusted)


def test_escape_sequences_are_not_shown(folder: Path, archipel: Command) -> None:  # noqa: F811
    """`inspect --unverified` shows what nobody signed; the card is decoded all the same."""
    file = folder / "card.json"
    file.write_bytes(file.read_bytes().replace(b"Three classes.", b"\\u001b]0;owned\\u0007"))
    resign(folder)
    out, err = archipel("inspect", str(folder), "--unverified")
    assert "NOT verified" in err
    assert "card: cannot be shown: card: description has U+001B" in out
    assert "\x1b" not in out + err
