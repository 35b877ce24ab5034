"""Open what `inspect`, `verify` and `compare` take: a bundle in a folder or a file, or a plain ONNX file."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from archipel.bundle import Bundle, decode_manifest, open_bundle, unpack
from archipel.bundle.foreign import recognize
from archipel.bundle.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES
from archipel.bundle.reader import BundleContents, UnverifiedBundle
from archipel.bundle.roles import Label
from archipel.cli.input_output.publisher_keys import remedy_of, tell_development, trusted_keys
from archipel.cli.input_output.sources import has_bundle, open_runtime, read_file
from archipel.errors import BundleError, CommandError
from archipel.lite_runtime.learned import BUNDLE_FOLDER, is_slot

if TYPE_CHECKING:
    from archipel.graph import Model


def is_bundle(path: Path) -> bool:
    """Whether the path is a bundle and not an ONNX file.

    Raises CommandError where there is no file, for the folder of a trained model, in which the bundle lies, and for
    files of other kinds.
    """
    if is_slot(path):
        raise CommandError(
            f"{path}: a model that `archipel fit --save` wrote; name the bundle in it: {path / BUNDLE_FOLDER}"
        )
    if (foreign := recognize(path)) is not None:
        raise CommandError(f"{path}: {foreign}")
    if path.is_dir():
        return True
    if not path.is_file():
        raise CommandError(f"{path}: no such file; expected a bundle (a folder or a .bundle file) or an ONNX file")
    # By name first: a damaged bundle is to be an error about a bundle.
    return path.suffix == ".bundle" or zipfile.is_zipfile(path)


def open_verified(path: Path, key_files: Sequence[Path], folder: str) -> Bundle:
    """The bundle, verified with one of the keys (none: the development key) and unpacked below `folder`.

    Raises CommandError, BundleError.
    """
    keys = trusted_keys(path, key_files)
    with remedy_of(key_files):
        bundle = open_bundle(path, keys, cache=Path(folder), allow_development=True)
    tell_development(bundle.publisher)
    return bundle


def open_unverified(path: Path, folder: str) -> UnverifiedBundle:
    """Open a bundle without checking its signature and its digests, so that nobody vouches for its content.

    Only its form is checked: a manifest, and a regular file for each name in it. Raises BundleError.
    """
    if path.is_file():
        unpack(path, Path(folder) / "bundle")
        path = Path(folder) / "bundle"
    file = path / MANIFEST_FILE
    # The size is checked before the file is read: it may come from anybody.
    if not file.is_file() or file.stat().st_size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{file}: not a manifest of up to {MAX_MANIFEST_BYTES} bytes; is {path} a bundle?")
    data = file.read_bytes()
    manifest = decode_manifest(data)
    for name in manifest.files:
        # A link could point to any file of this machine, whose content would then be shown.
        if (path / name).is_symlink() or not (path / name).is_file():
            raise BundleError(f"{path / name}: not a regular file, but the manifest lists it")
    return UnverifiedBundle(path, manifest, hashlib.sha256(data).hexdigest())


def read_program(bundle: BundleContents, name: str) -> Model:
    """The graph of a program as it is in the bundle, with its signature. Raises MissingExtraError, ModelImportError."""
    import archipel.graph  # noqa: F401  (first: its error names the extra that is missing)
    from archipel.compression.stored import read_program as read

    return read(bundle, name)


class Predicting(NamedTuple):
    """The graph that predicts, with only the examples as inputs, and what its bundle calls labels, None if nothing."""

    model: Model
    label: str | None


def read_predict(path: Path, key_files: Sequence[Path], weights: Path | None, folder: str) -> Predicting:
    """What predicts: an ONNX file as it is, or the `predict` of a bundle, a saved fit or a slot with present weights.

    Raises CommandError, BundleError, ModelImportError, RuntimeInputError for weights that do not fit.
    """
    if not has_bundle(path, weights):
        return Predicting(read_file(path), None)
    import archipel.graph  # noqa: F401
    from archipel.converter.opened import predict_model

    runtime = open_runtime(path, key_files, folder, 1, ["cpu"], weights)
    return Predicting(predict_model(runtime), _label_field(runtime.bundle))


def _label_field(bundle: Bundle) -> str | None:
    names = [port.name for program in bundle.manifest.programs.values() for port in program.inputs
             if isinstance(port, Label)]  # fmt: skip
    return names[0] if names else None
