"""Somebody changes which bundle a device gets as a variant of a release: a server or a mirror that carries it, or
another publisher whom the device's owner trusts as well.

The attacker has all files that were ever signed, and may have a trusted key of its own, but not the release's. It wants
a device to run a worse variant than its owner's limits allow, an older bundle, or a bundle of its own under the
release's name. What stops it: the release's signature covers the digest of each variant, and a bundle in a release
must be signed by the release's own publisher.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Variant, generate_key, open_release
from archipel.bundle.release import encode_release, write_release
from archipel.errors import DigestError, SignatureError
from archipel.lite_runtime import choose
from tests.support.releases import make_release


@pytest.fixture
def publisher() -> Ed25519PrivateKey:
    return generate_key()


@pytest.fixture
def other() -> Ed25519PrivateKey:
    return generate_key()


@pytest.fixture
def trusted(publisher: Ed25519PrivateKey, other: Ed25519PrivateKey) -> list[bytes]:
    """The owner trusts both publishers."""
    return [key.public_key().public_bytes_raw() for key in (publisher, other)]


@pytest.fixture
def release(tmp_path: Path, publisher: Ed25519PrivateKey) -> Path:
    make_release(tmp_path / "digits", publisher)
    return tmp_path / "digits"


def signed_by(file: Path, digest: str, old: Variant) -> Variant:
    """The entry that this file would need."""
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return msgspec.structs.replace(old, bytes=file.stat().st_size, sha256=sha256, digest=digest)


def test_a_swapped_variant(release: Path, trusted: list[bytes], tmp_path: Path) -> None:
    """Both files are the publisher's own, of the same size, and verify as bundles."""
    first, second = release / "float.bundle", release / "int8.bundle"
    assert first.stat().st_size == second.stat().st_size
    kept = first.read_bytes()
    shutil.copyfile(second, first)
    second.write_bytes(kept)
    for limit in ({}, {"max_memory": 999}):  # which take float and int8
        with pytest.raises(DigestError, match="has SHA-256"):
            choose(release, trusted, cache=tmp_path / "cache", **limit)


def test_an_older_bundle_of_the_publisher(
    release: Path, publisher: Ed25519PrivateKey, trusted: list[bytes], tmp_path: Path
) -> None:
    make_release(tmp_path / "older", publisher, names=("old", "older", "float"))
    shutil.copyfile(tmp_path / "older" / "float.bundle", release / "float.bundle")
    with pytest.raises(DigestError):
        choose(release, trusted, cache=tmp_path / "cache")


def test_another_publishers_bundle(
    release: Path, other: Ed25519PrivateKey, trusted: list[bytes], tmp_path: Path
) -> None:
    make_release(tmp_path / "theirs", other, names=("x", "y", "float"))
    shutil.copyfile(tmp_path / "theirs" / "float.bundle", release / "float.bundle")
    with pytest.raises(DigestError):
        choose(release, trusted, cache=tmp_path / "cache")
    # Nor can the other publisher, whom the owner trusts, list its bundle in this publisher's release.
    mine = open_release(release, trusted).release
    theirs = open_release(tmp_path / "theirs", trusted).release.variant("float")
    entry = signed_by(release / "float.bundle", theirs.digest, mine.variants[0])
    forged = msgspec.structs.replace(mine, variants=(entry, *mine.variants[1:]))
    (release / "release.json").write_bytes(encode_release(forged))
    with pytest.raises(SignatureError, match="none of the 2 trusted keys signed this release"):
        choose(release, trusted, cache=tmp_path / "cache")


def test_a_release_around_another_publishers_bundle(
    release: Path, publisher: Ed25519PrivateKey, other: Ed25519PrivateKey, trusted: list[bytes], tmp_path: Path
) -> None:
    """The other publisher signs a release of its own with the first one's bundle in it: as if both had made it."""
    write_release(release, open_release(release, trusted).release, other)
    assert open_release(release, trusted).publisher == other.public_key().public_bytes_raw()
    with pytest.raises(SignatureError, match="none of the 1 trusted keys signed this manifest"):
        choose(release, trusted, cache=tmp_path / "cache")
