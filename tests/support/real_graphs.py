"""A bundle with real graphs for a server in this process: the browser library's CNN, signed by its publisher."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import (
    WEIGHTS_FILE,
    decode_manifest,
    encode_manifest,
    pack,
    parameter_specs,
    read_weights,
    unpack,
    write_weights,
)
from archipel.bundle.manifest import MANIFEST_FILE, SIGNATURE_FILE

CNN = Path(__file__).resolve().parents[2] / "web/tests/fixtures/cnn.bundle"
Arrays = Mapping[str, np.ndarray]


def sign_cnn(
    folder: Path,
    signer: Ed25519PrivateKey,
    name: str = "cnn",
    *,
    weights: Callable[[Arrays], Arrays] | None = None,
    graphs: Mapping[str, bytes] | None = None,
) -> Path:
    """The file FOLDER/NAME.bundle, with other weights, or other graphs of programs by name, if they are given."""
    place = folder / name
    unpack(CNN, place)
    manifest = decode_manifest((place / MANIFEST_FILE).read_bytes())
    arrays = {each: array.copy() for each, array in read_weights(place / WEIGHTS_FILE).items()}
    changed = {WEIGHTS_FILE: write_weights(weights(arrays))} if weights else {}
    changed |= {manifest.programs[program].file: data for program, data in (graphs or {}).items()}
    files = dict(manifest.files)
    for file, data in changed.items():
        (place / file).write_bytes(data)
        files[file] = hashlib.sha256(data).hexdigest()
    names = [spec.name for spec in manifest.parameters]
    parameters = parameter_specs(read_weights(place / WEIGHTS_FILE), names)
    data = encode_manifest(msgspec.structs.replace(manifest, name=name, files=files, parameters=parameters))
    (place / MANIFEST_FILE).write_bytes(data)
    (place / SIGNATURE_FILE).write_bytes(signer.sign(data))
    pack(place, folder / f"{name}.bundle")
    return folder / f"{name}.bundle"
