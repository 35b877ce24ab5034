from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.client.downloads.cache import Cache
from archipel.errors import DigestError, SignatureError, UnreachableError
from archipel.protocol.sealed import public_bytes


class Source:
    """Serves bytes by URL; `part` cuts the first answer short, as a broken connection would."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.cut: int | None = None

    def __call__(self, url: str, target: Path, limit: int) -> None:
        there = target.read_bytes() if target.exists() else b""
        self.fetched.append(url)
        data = self.files[url]
        if self.cut is not None:
            target.write_bytes(data[: self.cut])
            self.cut = None
            raise UnreachableError("cut")
        target.write_bytes(there + data[len(there) :])


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 30)


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return b.generate_key()


@pytest.fixture
def bundle(bundle_maker: Callable[..., Path], key: Ed25519PrivateKey, source: Source) -> str:
    file = bundle_maker(key)
    digest = b.open_bundle(file, [public_bytes(key)]).digest
    source.files[f"/v1/bundles/{digest}"] = file.read_bytes()
    return digest


def weights(source: Source, number: int, size: int = 4) -> str:
    data = b.write_weights({"w": np.full(size, number, np.float32)})
    digest = hashlib.sha256(data).hexdigest()
    source.files[f"/v1/blobs/{digest}"] = data
    return digest


def test_a_bundle_is_fetched_once(
    cache: Cache, source: Source, bundle: str, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    for _ in range(2):
        assert cache.bundle(bundle, [public_bytes(key)], source, 1 << 20).digest == bundle
    again = Cache(tmp_path / "cache", 1 << 30)
    assert again.bundle(bundle, [public_bytes(key)], source, 1 << 20).manifest.name == "linear"
    assert len(source.fetched) == 1
    assert not list((tmp_path / "cache" / "parts").iterdir())


def test_a_damaged_copy_on_disk_is_fetched_again(
    cache: Cache, source: Source, bundle: str, key: Ed25519PrivateKey
) -> None:
    trusted = [public_bytes(key)]
    folder = cache.bundle(bundle, trusted, source, 1 << 20).folder
    (folder / "train.onnx").write_bytes(b"other")
    assert cache.bundle(bundle, trusted, source, 1 << 20).digest == bundle
    assert len(source.fetched) == 2


def test_a_cached_bundle_is_verified_with_the_keys_of_the_moment(
    cache: Cache, source: Source, bundle: str, key: Ed25519PrivateKey
) -> None:
    cache.bundle(bundle, [public_bytes(key)], source, 1 << 20)
    with pytest.raises(SignatureError):
        cache.bundle(bundle, [public_bytes(b.generate_key())], source, 1 << 20)


def test_a_broken_download_is_continued(cache: Cache, source: Source, bundle: str, key: Ed25519PrivateKey) -> None:
    source.cut = 100
    with pytest.raises(UnreachableError):
        cache.bundle(bundle, [public_bytes(key)], source, 1 << 20)
    assert cache.bundle(bundle, [public_bytes(key)], source, 1 << 20).digest == bundle


def test_a_wrong_part_is_given_up_once(
    cache: Cache, source: Source, key: Ed25519PrivateKey, tmp_path: Path, bundle: str
) -> None:
    digest = weights(source, 1)
    (tmp_path / "cache" / "parts" / digest).write_bytes(b"not the beginning of it")
    assert cache.weights(digest, source, 1 << 20)["w"][0] == 1
    (tmp_path / "cache" / "parts" / f"{bundle}.bundle").write_bytes(b"neither")
    assert cache.bundle(bundle, [public_bytes(key)], source, 1 << 20).digest == bundle
    assert len(source.fetched) == 4


def test_wrong_bytes_are_not_kept(cache: Cache, source: Source, tmp_path: Path) -> None:
    digest = weights(source, 1)
    source.files[f"/v1/blobs/{digest}"] = b.write_weights({"w": np.zeros(4, np.float32)})
    with pytest.raises(DigestError, match=f"asked for {digest}"):
        cache.weights(digest, source, 1 << 20)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_weights_on_disk_are_checked_at_every_use(cache: Cache, source: Source, tmp_path: Path) -> None:
    digest = weights(source, 1)
    assert cache.weights(digest, source, 1 << 20)["w"].tolist() == [1, 1, 1, 1]
    blob = tmp_path / "cache" / "blobs" / digest
    blob.write_bytes(blob.read_bytes()[:-1] + b"\7")
    assert cache.weights(digest, source, 1 << 20)["w"].tolist() == [1, 1, 1, 1]
    assert len(source.fetched) == 2


def test_what_was_not_used_for_longest_goes_first(source: Source, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 3500)
    digests = [weights(source, number, 250) for number in range(4)]
    for age, digest in enumerate(digests):
        cache.weights(digest, source, 1 << 20)
        os.utime(tmp_path / "cache" / "blobs" / digest, ns=(age, age))
    cache.prune(keep=[digests[0]])
    left = {path.name for path in (tmp_path / "cache" / "blobs").iterdir()}
    # Two beside the one that is held.
    assert left == {digests[0], digests[2], digests[3]}
    Cache(tmp_path / "cache", 0).prune()
    assert not list((tmp_path / "cache" / "blobs").iterdir())


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    Cache(tmp_path, 1)
    (tmp_path / "bundles" / ".unpack-x" / "bundle").mkdir(parents=True)
    Cache(tmp_path, 1)
    assert not list((tmp_path / "bundles").iterdir())
