"""Open a bundle: check its signature and every digest before anything in it is used."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from archipel.bundle.archive import unpack
from archipel.bundle.card import CARD_FILE, MAX_CARD_BYTES, ModelCard, decode_card
from archipel.bundle.foreign import recognize
from archipel.bundle.graphs import MAX_GRAPH_BYTES, inspect_graph
from archipel.bundle.keys import is_development_key
from archipel.bundle.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    MAX_TENSOR_BYTES,
    SIGNATURE_FILE,
    WEIGHTS_FILE,
    Manifest,
    decode_manifest,
)
from archipel.bundle.roles import Program
from archipel.bundle.weights import read_weights, release_pages
from archipel.durable import publish, sync_folder
from archipel.errors import (
    BundleError,
    CardError,
    DevelopmentKeyError,
    DigestError,
    ManifestError,
    SignatureError,
    TensorLayoutError,
    UnsafeGraphError,
    UnsafePathError,
)

_KEPT_RESULTS = 256


class BundleContents:
    """The contents of a bundle's folder as its manifest, whose SHA-256 is `digest`, lists them.

    Tensors are mapped from weights.safetensors, not copied. `Bundle` and `UnverifiedBundle`, below, say whether the
    signature is checked.
    """

    def __init__(self, folder: Path, manifest: Manifest, digest: str) -> None:
        self.folder = folder
        self.manifest = manifest
        self.digest = digest

    @cached_property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """Every tensor of weights.safetensors by name: read-only, mapped."""
        if WEIGHTS_FILE not in self.manifest.files:
            return {}
        return read_weights(self.folder / WEIGHTS_FILE)

    def tensor(self, name: str) -> np.ndarray:
        """One of `tensors`. Raises TensorLayoutError where there is none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorLayoutError(f"bundle {self.manifest.name!r}: no tensor {name!r} in {WEIGHTS_FILE}") from None

    def parameters(self) -> dict[str, np.ndarray]:
        """The published global model, in the manifest's order."""
        return {spec.name: self.tensor(spec.name) for spec in self.manifest.parameters}

    @cached_property
    def card(self) -> ModelCard | None:
        """The model card, None without one. Raises CardError where it is not well formed, DigestError.

        Opening a bundle does not decode it: no device may refuse a model for a text that it does not read.
        """
        if CARD_FILE not in self.manifest.files:
            return None
        data = _read(self.folder, CARD_FILE, MAX_CARD_BYTES)
        if hashlib.sha256(data).hexdigest() != self.manifest.files[CARD_FILE]:
            raise DigestError(f"{self.folder / CARD_FILE}: its SHA-256 is not the manifest's; fetch it again")
        return decode_card(data)

    def program(self, name: str) -> Program:
        """The program of that name. Raises a BundleError that lists the bundle's programs."""
        try:
            return self.manifest.programs[name]
        except KeyError:
            names = ", ".join(sorted(self.manifest.programs)) or "none"
            raise BundleError(f"bundle {self.manifest.name!r} has no program {name!r}; it has: {names}") from None

    def program_path(self, name: str) -> Path:
        return self.folder / self.program(name).file

    def inspect_graphs(self) -> None:
        """Check every program's graph before it may be run, and the source. Raises UnsafeGraphError or DigestError.

        `open_bundle` calls this, and so does the code that makes a session: graphs that passed are remembered.
        """
        size = (self.folder / WEIGHTS_FILE).stat().st_size if WEIGHTS_FILE in self.manifest.files else 0
        graphs = {program.file: name for name, program in self.manifest.programs.items()}
        if self.manifest.source:
            graphs.setdefault(self.manifest.source, "source")
        for file, name in graphs.items():
            _inspect(name, self.folder, file, (self.manifest.files[file], size))


class Bundle(BundleContents):
    """A verified bundle, as `open_bundle` returns it.

    `publisher` (raw 32-byte Ed25519 public key) signed its manifest, and every file has the digest that stands there.
    Code that predicts, trains or publishes takes only this class.

    Example:
        bundle = open_bundle("digits.bundle", trusted_keys)
        print(bundle.manifest.name, bundle.digest, sorted(bundle.manifest.programs))
    """

    def __init__(self, folder: Path, manifest: Manifest, digest: str, publisher: bytes) -> None:
        super().__init__(folder, manifest, digest)
        self.publisher = publisher


class UnverifiedBundle(BundleContents):
    """A bundle whose signature is not checked: anybody may have written it. It is for displaying its contents."""


def open_bundle(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    cache: Path | str | None = None,
    *,
    allow_development: bool = False,
) -> Bundle:
    """Open and verify a bundle.

    Arguments:
        path: a bundle folder or a `.bundle` file.
        trusted_keys: raw 32-byte Ed25519 public keys, one of which must have signed the bundle.
        cache: a `.bundle` file is unpacked to CACHE/DIGEST (default: archipel/ in the user's cache folder). A copy that
            is there already is verified again and used.
        allow_development: whether a development key may have signed it (`is_development_key`).

    Returns:
        The bundle in its folder; its tensors are mapped, not read.

    Raises a BundleError that says what is wrong.

    Example:
        bundle = open_bundle("digits.bundle", [load_public_key("publisher.pub")])
        weights = bundle.parameters()
    """
    path = Path(path)
    if path.is_dir():
        if (foreign := recognize(path)) is not None:
            raise BundleError(f"{path}: {foreign}")
        return verify_folder(path, trusted_keys, allow_development=allow_development)
    if not path.is_file():
        raise BundleError(f"{path}: no such bundle (expected a folder or a .bundle file)")
    root = Path(cache) if cache is not None else _default_cache()
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Its final name is its digest, known once it is unpacked. A kill leaves the folder behind; the owner of `root`
        # removes such folders.
        staging = Path(tempfile.mkdtemp(prefix=".unpack-", dir=root))
    except OSError as error:
        raise BundleError(f"{root}: cannot unpack {path.name} there ({error.strerror}); pass another cache") from None
    try:
        unpack(path, staging / "bundle")
        sync_folder(staging / "bundle")
        digest = verify_folder(staging / "bundle", trusted_keys, path, allow_development=allow_development).digest
        target = root / digest
        if target.is_dir():
            try:
                return verify_folder(target, trusted_keys, allow_development=allow_development)
            except BundleError:
                # A half-written or damaged copy; the one just unpacked has been verified.
                shutil.rmtree(target)
        try:
            publish(staging / "bundle", target)
        except OSError:
            # Another process put the same digest there between the check and the rename.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    # Again: the folder under this name may be another process's.
    return verify_folder(target, trusted_keys, allow_development=allow_development)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "archipel"


def verify_folder(
    folder: Path, trusted_keys: Sequence[bytes], shown: Path | None = None, *, allow_development: bool = False
) -> Bundle:
    """The bundle in `folder`, once its signature, manifest, files, parameters and graphs are checked.

    `shown` is the file that the folder was unpacked from, which a signature error names. Raises BundleError.
    """
    # The signature covers the manifest's bytes, and the manifest has the digest of every other file, so nothing is
    # decoded before it is authentic. A file that the manifest does not list is refused: nobody signed it.
    manifest_bytes = _read(folder, MANIFEST_FILE, MAX_MANIFEST_BYTES)
    signature = _read(folder, SIGNATURE_FILE, 64)
    where = shown or folder
    publisher = verify_signature(manifest_bytes, signature, trusted_keys, where, allow_development=allow_development)
    manifest = decode_manifest(manifest_bytes)
    expected = {MANIFEST_FILE, SIGNATURE_FILE, *manifest.files}
    for entry in folder.iterdir():
        if entry.name not in expected:
            raise UnsafePathError(f"{folder}: {entry.name!r} is not in the manifest; remove it")
        if entry.is_symlink() or not entry.is_file():
            raise UnsafePathError(f"{folder}: {entry.name!r} is not a regular file")
    for name, digest in manifest.files.items():
        actual = _file_digest(folder / name)
        if actual != digest:
            raise DigestError(f"{folder / name}: SHA-256 is {actual}, the manifest says {digest}; fetch it again")
    bundle = Bundle(folder, manifest, hashlib.sha256(manifest_bytes).hexdigest(), publisher)
    _check_parameters(bundle)
    bundle.inspect_graphs()
    return bundle


def verify_signature(
    signed: bytes,
    signature: bytes,
    trusted_keys: Sequence[bytes],
    where: Path | str,
    what: str = "manifest",
    *,
    allow_development: bool = False,
) -> bytes:
    """The key among `trusted_keys` that signed these bytes, a manifest's or those of `what`.

    Raises SignatureError where none of them did, DevelopmentKeyError where a development key did and
    `allow_development` is not given.
    """
    if not trusted_keys:
        raise SignatureError(f"{where}: no trusted keys given, so nothing can be verified")
    for key in trusted_keys:
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
        except (InvalidSignature, ValueError):
            continue
        if is_development_key(key) and not allow_development:
            raise DevelopmentKeyError(
                f"{where}: signed with a development key, which is for trying out only; sign it with a key of "
                "`archipel keys FILE`, or allow development keys (allow_development)"
            )
        return key
    raise SignatureError(f"{where}: none of the {len(trusted_keys)} trusted keys signed this {what}")


_passed: OrderedDict[tuple[str, int], None] = OrderedDict()
"""Graphs that passed, by their SHA-256 and the size of the weights, which together decide the result. A bundle is
opened several times on its way into a cache or a slot."""
_lock = threading.Lock()


def _inspect(name: str, folder: Path, file: str, key: tuple[str, int]) -> None:
    with _lock:
        if key in _passed:
            _passed.move_to_end(key)
            return
    # Outside the lock, so that a large graph does not delay others; at worst two threads check the same graph.
    data = _read(folder, file, MAX_GRAPH_BYTES)
    if hashlib.sha256(data).hexdigest() != key[0]:
        raise DigestError(f"{folder / file}: its SHA-256 is not the manifest's; fetch it again")
    inspect_graph(name, data, (WEIGHTS_FILE, key[1]))
    with _lock:
        _passed[key] = None
        if len(_passed) > _KEPT_RESULTS:
            _passed.popitem(last=False)


def _check_parameters(bundle: BundleContents) -> None:
    for spec in bundle.manifest.parameters:
        array = bundle.tensor(spec.name)
        if array.dtype.name != spec.dtype or array.shape != spec.shape:
            raise TensorLayoutError(
                f"parameter {spec.name!r}: {WEIGHTS_FILE} holds {array.dtype}{list(array.shape)}, "
                f"the manifest says {spec.dtype}{list(spec.shape)}"
            )
        if hashlib.sha256(array.data if array.size else b"").hexdigest() != spec.sha256:
            raise DigestError(f"parameter {spec.name!r}: its bytes differ from the manifest's SHA-256")
        # Hashing read the pages of a mapped file; a small device need not hold the whole model for that.
        release_pages(array)


def _read(folder: Path, name: str, limit: int) -> bytes:
    try:
        with open(folder / name, "rb") as file:
            # `read` allocates as much as it is asked for, so not simply `limit`; one byte more shows a file over it.
            data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    except OSError as error:
        raise BundleError(f"{folder / name}: cannot be read ({error.strerror}); is {folder} a bundle?") from None
    if len(data) > limit:
        kind = {SIGNATURE_FILE: SignatureError, MANIFEST_FILE: ManifestError, CARD_FILE: CardError}.get(
            name, UnsafeGraphError
        )
        raise kind(f"{folder / name}: more than {limit} bytes")
    return data


def _file_digest(path: Path) -> str:
    try:
        if path.stat().st_size > 2 * MAX_TENSOR_BYTES:
            raise TensorLayoutError(f"{path}: {path.stat().st_size} bytes, the limit is {2 * MAX_TENSOR_BYTES}")
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DigestError(f"{path}: cannot be read ({error.strerror}), but the manifest lists it") from None
