"""A release: bundles of one model for different devices, which their publisher signed as one.

RELEASE/release.json    canonical JSON: the variants, best first, each with the digests and costs of its bundle
RELEASE/release.sig     Ed25519 over a prefix of its own and these bytes
RELEASE/NAME.bundle     the bundle of the variant NAME; a device may have fetched only some of them
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle.archive import MAX_ARCHIVE_BYTES
from archipel.bundle.foreign import RELEASE_FILE
from archipel.bundle.reader import Bundle, open_bundle, verify_signature
from archipel.bundle.validation import MAX_WHOLE, check_digest, check_text
from archipel.durable import write_durably
from archipel.errors import BundleError, DigestError, ManifestError, SignatureError, UnknownVersionError

RELEASE_SIGNATURE_FILE = "release.sig"
RELEASE_FORMAT = 1
MAX_RELEASE_BYTES = 64 << 10
MAX_VARIANTS = 16
_PREFIX = b"archipel release\0"
"""Signed before the bytes, so that the signature of a release is never one of a manifest, nor the other way round."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Variant(_Strict, frozen=True, kw_only=True):
    """One of a release's bundles.

    `bytes` is the size of its file, `sha256` the file's digest, and `digest` that of the manifest in it, by which
    servers and devices name bundles. `peak_bytes` and `flops_per_example` are what its `predict` needs for one example:
    inputs, weights and intermediate values that are alive together, and two FLOPs for each multiplication with its
    addition. `accuracy` is the share of the publisher's validation examples that `predict` has right, None where it was
    not measured.

    Example: see `archipel.bundle.Release`.
    """

    name: str
    bytes: int
    sha256: str
    digest: str
    peak_bytes: int
    flops_per_example: int
    accuracy: float | None = None

    @property
    def file(self) -> str:
        """The name of the bundle's file in the release's folder."""
        return f"{self.name}.bundle"


class Release(_Strict, frozen=True, kw_only=True):
    """The variants of the model `name`, best first: a device takes the first one that fits its owner's limits.

    Example:
        release = open_release("digits", trusted_keys).release
        print([(each.name, each.bytes, each.peak_bytes) for each in release.variants])
    """

    format: int
    name: str
    variants: tuple[Variant, ...]

    def variant(self, name: str) -> Variant:
        """The variant of that name. Raises a BundleError that lists the release's variants."""
        for each in self.variants:
            if each.name == name:
                return each
        raise BundleError(
            f"release {self.name!r} has no variant {name!r}; it has: {', '.join(each.name for each in self.variants)}"
        )


class _Header(msgspec.Struct):
    format: int


_DECODER = msgspec.json.Decoder(Release)
_HEADER_DECODER = msgspec.json.Decoder(_Header)
_ENCODER = msgspec.json.Encoder(order="sorted")


class SignedRelease:
    """A release in its folder, whose signature by `publisher` (raw 32-byte public key) is verified.

    `digest` is the SHA-256 of release.json. The bundles' files are checked when they are opened.

    Example: see `archipel.bundle.open_release`.
    """

    def __init__(self, folder: Path, release: Release, digest: str, publisher: bytes) -> None:
        self.folder = folder
        self.release = release
        self.digest = digest
        self.publisher = publisher

    def open(self, name: str, cache: Path | str | None = None) -> Bundle:
        """Open and verify the bundle of a variant, which the release's publisher must have signed.

        Arguments:
            name: the variant's name.
            cache: as for `open_bundle`.

        Raises:
            BundleError: there is no such variant, its file is missing, or it is not the bundle that was released.
        """
        variant = self.release.variant(name)
        path = self.folder / variant.file
        where = f"{path}: variant {name!r} of release {self.release.name!r}"
        try:
            size = path.stat().st_size
            if size != variant.bytes:
                raise DigestError(f"{where} has {variant.bytes:,} bytes, this file {size:,}; fetch it again")
            with open(path, "rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise BundleError(f"{where} cannot be read ({error.strerror}); fetch it again") from None
        if actual != variant.sha256:
            raise DigestError(f"{where} has SHA-256 {variant.sha256}, this file {actual}; fetch it again")
        # Only the release's own publisher: another one's bundle has no place in it, however trusted. The manifest's
        # digest is compared after the file was unpacked, which somebody may have replaced since it was read above.
        # The signature of the release has been checked, so a development key is one that is allowed.
        bundle = open_bundle(path, [self.publisher], cache, allow_development=True)
        if bundle.digest != variant.digest:
            raise DigestError(f"{where} is bundle {variant.digest}, this file holds {bundle.digest}; fetch it again")
        if bundle.manifest.name != self.release.name:
            raise ManifestError(f"{where}: its bundle is called {bundle.manifest.name!r}")
        return bundle


def is_release(path: Path | str) -> bool:
    """Whether `path` is the folder of a release, by its content."""
    return (Path(path) / RELEASE_FILE).is_file()


def open_release(
    folder: Path | str, trusted_keys: Sequence[bytes], *, allow_development: bool = False
) -> SignedRelease:
    """Open the release in `folder` and verify its signature.

    Arguments:
        folder: with release.json, release.sig and the bundles.
        trusted_keys: raw 32-byte Ed25519 public keys, one of which must have signed it.
        allow_development: whether a development key may have signed it and its bundles.

    Raises a BundleError that says what is wrong.

    Example:
        release = open_release("digits", [load_public_key("publisher.pub")])
        bundle = release.open("int8")
    """
    folder = Path(folder)
    data = _read(folder / RELEASE_FILE, MAX_RELEASE_BYTES)
    signature = _read(folder / RELEASE_SIGNATURE_FILE, 64)
    publisher = verify_signature(
        _PREFIX + data, signature, trusted_keys, folder, "release", allow_development=allow_development
    )
    return SignedRelease(folder, decode_release(data), hashlib.sha256(data).hexdigest(), publisher)


def write_release(folder: Path, release: Release, key: Ed25519PrivateKey) -> None:
    """Write release.json and release.sig into `folder`, which has the bundles. Raises ManifestError, OSError."""
    data = encode_release(release)
    write_durably(folder / RELEASE_FILE, data, 0o644)
    write_durably(folder / RELEASE_SIGNATURE_FILE, key.sign(_PREFIX + data), 0o644)


def encode_release(release: Release) -> bytes:
    """The release in canonical JSON: keys sorted, no white space, default values left out. Raises ManifestError."""
    _validate(release)
    data = _ENCODER.encode(release)
    _check_size(len(data))
    return data


def decode_release(data: bytes) -> Release:
    """Decode and validate release.json. Raises a ManifestError that says what is wrong."""
    _check_size(len(data))
    # The format alone first: a release of a later format must say so, and not fail at a field that is unknown here.
    try:
        header = _HEADER_DECODER.decode(data)
        if header.format != RELEASE_FORMAT:
            raise UnknownVersionError(
                f"release: format {header.format}, this installation reads format {RELEASE_FORMAT}; update archipel"
            )
        release = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"release: {error}") from None
    _validate(release)
    if _ENCODER.encode(release) != data:
        raise ManifestError("release: not canonical JSON (sorted keys, no white space, defaults left out)")
    return release


def _validate(release: Release) -> None:
    if release.format != RELEASE_FORMAT:
        raise UnknownVersionError(f"release: format {release.format}, expected {RELEASE_FORMAT}")
    check_text("release: name", release.name)
    if not 1 <= len(release.variants) <= MAX_VARIANTS:
        raise ManifestError(f"release: {len(release.variants)} variants, expected 1 to {MAX_VARIANTS}")
    for each in release.variants:
        check_variant_name(each.name)
        where = f"release: variant {each.name!r}"
        check_digest(f"{where}: sha256", each.sha256)
        check_digest(f"{where}: digest", each.digest)
        if not 1 <= each.bytes <= MAX_ARCHIVE_BYTES:
            raise ManifestError(f"{where}: {each.bytes} bytes, expected 1 to {MAX_ARCHIVE_BYTES}")
        if not (0 <= each.peak_bytes <= MAX_WHOLE and 0 <= each.flops_per_example <= MAX_WHOLE):
            raise ManifestError(f"{where}: peak_bytes and flops_per_example are whole numbers from 0 to {MAX_WHOLE}")
        if each.accuracy is not None and not (math.isfinite(each.accuracy) and 0 <= each.accuracy <= 1):
            raise ManifestError(f"{where}: accuracy {each.accuracy}, expected 0 to 1")
    for field in ("name", "digest"):
        if len({getattr(each, field) for each in release.variants}) != len(release.variants):
            raise ManifestError(f"release: two variants have the same {field}")


def check_variant_name(name: str) -> None:
    """Raises ManifestError unless `name` can be a variant's, and so the plain name of a file."""
    if not _NAME.fullmatch(name):
        raise ManifestError(
            f"release: variant name {name!r}: expected 1 to 32 lower case letters, digits, '-' and '_', a letter or "
            "digit first"
        )


def _check_size(size: int) -> None:
    if size > MAX_RELEASE_BYTES:
        raise ManifestError(f"release: {size} bytes, the limit is {MAX_RELEASE_BYTES}")


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror}); is {path.parent} a release?") from None
    if len(data) > limit:
        kind = SignatureError if path.name == RELEASE_SIGNATURE_FILE else ManifestError
        raise kind(f"{path}: more than {limit} bytes")
    return data
