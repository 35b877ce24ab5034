"""Development keys: what they are told by, where they are kept, and what refuses them."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.bundle import development, keys
from archipel.errors import DevelopmentKeyError, SignatureError
from archipel.protocol.sealed import public_bytes
from tests.support.development import PUBLIC, fixed_development_key, place_development_key
from tests.support.linear_bundle import make_bundle


def test_the_mark_is_16_zero_bits_of_the_keys_sha256() -> None:
    assert hashlib.sha256(PUBLIC).hexdigest().startswith("0000")
    assert public_bytes(fixed_development_key()) == PUBLIC
    assert b.is_development_key(PUBLIC)
    for number in range(300):
        other = public_bytes(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")))
        assert b.is_development_key(other) is (hashlib.sha256(other).hexdigest()[:4] == "0000")


def test_a_made_key_has_it_and_a_real_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([fixed_development_key(), other := Ed25519PrivateKey.generate()])

    class Drawn:
        generate = staticmethod(lambda: next(drawn))

    monkeypatch.setattr(keys, "Ed25519PrivateKey", Drawn)
    assert b.generate_key() is other
    drawn = iter([other, other, made := fixed_development_key()])
    monkeypatch.setattr(development, "Ed25519PrivateKey", Drawn)
    assert b.generate_development_key() is made


@pytest.mark.sampled(every=8)
def test_it_is_made_once_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    key, made = b.development_key()
    file = tmp_path / "config/archipel/development.key"
    assert made
    assert b.development_key_file() == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert hashlib.sha256(public_bytes(key)).digest()[:2] == b"\0\0"
    again, made = b.development_key()
    assert not made
    assert public_bytes(again) == public_bytes(key)
    file.unlink()
    b.save_private_key(b.generate_key(), file)
    with pytest.raises(SignatureError, match="not a development key"):
        b.development_key()


def test_open_bundle_refuses_it_unless_told_otherwise(tmp_path: Path) -> None:
    file = make_bundle(tmp_path / "linear", fixed_development_key())
    for path in (file, tmp_path / "linear"):
        with pytest.raises(DevelopmentKeyError, match=r"signed with a development key.*archipel keys FILE"):
            b.open_bundle(path, [PUBLIC], tmp_path / "cache")
        assert b.open_bundle(path, [PUBLIC], tmp_path / "cache", allow_development=True).publisher == PUBLIC
    # Allowing it does not trust it.
    with pytest.raises(SignatureError, match="none of the 1 trusted keys"):
        b.open_bundle(file, [public_bytes(b.generate_key())], tmp_path / "cache", allow_development=True)


def test_the_fixed_key_can_be_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_development_key(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert public_bytes(b.development_key()[0]) == PUBLIC
