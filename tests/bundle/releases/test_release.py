"""Releases: canonical JSON with limits, one signature over all variants, and bundles that are what was released."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.bundle.release import (
    MAX_RELEASE_BYTES,
    Release,
    decode_release,
    encode_release,
    is_release,
    open_release,
)
from archipel.errors import BundleError, DigestError, ManifestError, SignatureError, UnknownVersionError
from tests.support.releases import make_release

CORPUS = Path(__file__).parent / "corpus"


def public(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


@pytest.fixture
def release(tmp_path: Path, key: Ed25519PrivateKey) -> Release:
    return make_release(tmp_path / "released", key)


@pytest.fixture
def folder(tmp_path: Path, release: Release) -> Path:
    return tmp_path / "released"


@pytest.fixture
def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "release.json").read_bytes())


def canonical(document: object) -> bytes:
    """An independent writer of the canonical form: Python's json."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def test_what_was_written_opens(folder: Path, release: Release, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    data = (folder / "release.json").read_bytes()
    assert is_release(folder)
    assert not is_release(tmp_path)
    assert encode_release(decode_release(data)) == data == canonical(json.loads(data))
    signed = open_release(folder, public(key))
    assert signed.release == release
    assert (signed.digest, signed.publisher) == (hashlib.sha256(data).hexdigest(), public(key)[0])
    for number, name in enumerate(("float", "int8")):
        opened = signed.open(name, tmp_path / "cache")
        assert opened.manifest.lineage.metrics == {"place": number}
    with pytest.raises(BundleError, match=r"release 'tiny' has no variant 'small'; it has: float, int8"):
        signed.open("small")
    with pytest.raises(BundleError, match=r"a release of several bundles; name one"):
        b.open_bundle(folder, public(key))


def test_the_signature_is_of_a_release_alone(folder: Path, key: Ed25519PrivateKey) -> None:
    """A publisher's signature over the same bytes as a manifest, or of another key, is none."""
    data = (folder / "release.json").read_bytes()
    signature = (folder / "release.sig").read_bytes()
    key.public_key().verify(signature, b"archipel release\0" + data)
    for wrong in (key.sign(data), b.generate_key().sign(b"archipel release\0" + data), b"", signature + b"x"):
        (folder / "release.sig").write_bytes(wrong)
        with pytest.raises(SignatureError):
            open_release(folder, public(key))
    (folder / "release.sig").write_bytes(signature)
    (folder / "release.json").write_bytes(data.replace(b'"peak_bytes":1000', b'"peak_bytes":1001'))
    with pytest.raises(SignatureError, match="none of the 1 trusted keys signed this release"):
        open_release(folder, public(key))


def test_files_that_are_missing_or_other(folder: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    signed = open_release(folder, public(key))
    file = folder / "int8.bundle"
    data = file.read_bytes()
    file.write_bytes(data + b"x")
    with pytest.raises(DigestError, match=rf"int8\.bundle: variant 'int8' of release 'tiny' has {len(data):,} bytes"):
        signed.open("int8", tmp_path / "cache")
    file.write_bytes(data[:-1] + b"x")
    with pytest.raises(DigestError, match="has SHA-256"):
        signed.open("int8", tmp_path / "cache")
    file.unlink()
    with pytest.raises(BundleError, match=r"cannot be read .*; fetch it again"):
        signed.open("int8", tmp_path / "cache")
    signed.open("float", tmp_path / "cache")


def _change(**values: object) -> Any:
    def change(document: dict[str, Any]) -> None:
        document["variants"][0].update(values)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change(name="../float"), r"variant name '\.\./float': expected 1 to 32"),
        (_change(name="Float"), "variant name 'Float'"),
        (_change(name="int8"), "two variants have the same name"),
        (_change(bytes=0), "0 bytes, expected 1 to 4294967296"),
        (_change(bytes=(4 << 30) + 1), "4294967297 bytes"),
        (_change(bytes=1.5), "Expected `int`"),
        (_change(sha256="0" * 63), "sha256: expected a SHA-256"),
        (_change(digest="A" * 64), "digest: expected a SHA-256"),
        (_change(peak_bytes=-1), "whole numbers from 0 to"),
        (_change(flops_per_example=2**53), "whole numbers from 0 to"),
        (_change(accuracy=1.01), "accuracy 1.01, expected 0 to 1"),
        (_change(accuracy=-0.5), "accuracy -0.5"),
        (_change(accuracy=None), "not canonical JSON"),
        (_change(file="float.bundle"), "unknown field `file`"),
        (lambda document: document.update(variants=[]), "0 variants, expected 1 to 16"),
        (lambda document: document.update(variants=document["variants"] * 9), "18 variants"),
        (lambda document: document.update(name=""), "release: name: expected 1 to 256"),
        (lambda document: document.update(extra=1), "unknown field `extra`"),
        (lambda document: document.pop("name"), "missing required field `name`"),
        (lambda document: document["variants"][1].update(digest=document["variants"][0]["digest"]), "same digest"),
    ],
)
@pytest.mark.sampled(every=6)
def test_each_rule_has_its_error(document: dict[str, Any], change: Any, message: str) -> None:
    change(document)
    with pytest.raises(ManifestError, match=message):
        decode_release(canonical(document))


def test_bytes_beside_the_rules(document: dict[str, Any]) -> None:
    with pytest.raises(UnknownVersionError, match="format 2, this installation reads format 1; update archipel"):
        decode_release(canonical({**document, "format": 2, "later": True}))
    with pytest.raises(ManifestError, match="not canonical JSON"):
        decode_release(json.dumps(document).encode())
    with pytest.raises(ManifestError, match=f"the limit is {MAX_RELEASE_BYTES}"):
        decode_release(canonical({**document, "name": "x" * MAX_RELEASE_BYTES}))
    with pytest.raises(ManifestError, match="18 variants"):
        encode_release(msgspec.convert({**document, "variants": document["variants"] * 9}, Release))


def test_mutated_releases_are_decoded_or_refused(folder: Path) -> None:
    """Only documented errors; what is accepted is a release whose bytes are the ones that were given."""
    good = (folder / "release.json").read_bytes()
    refused = 0
    for seed in range(3000):
        rng = random.Random(seed)
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    del data[at : at + rng.choice([1, 3, 20])]
                case 2:
                    data[at:at] = data[max(0, at - 40) : at]
                case 3:
                    data[at : at + 4] = rng.choice([b"null", b"-1e9", b"[[[[", b"1e99", b'"":0', b"\xff\xfe\0\0"])
        try:
            assert encode_release(decode_release(bytes(data))) == bytes(data), seed
        except ManifestError:
            refused += 1
    assert refused > 1500


def test_the_kept_corpus() -> None:
    """Files are called ERROR-NAME.json."""
    cases = sorted(CORPUS.iterdir())
    assert len(cases) >= 6
    for case in cases:
        with pytest.raises(ManifestError) as caught:
            decode_release(case.read_bytes())
        assert type(caught.value).__name__ == case.name.split("-")[0], case.name
