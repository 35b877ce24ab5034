"""Write and sign a bundle folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle.card import CARD_FILE, ModelCard, encode_card
from archipel.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SIGNATURE_FILE,
    WEIGHTS_FILE,
    Limits,
    Lineage,
    Manifest,
    Phase,
    PrivacyPolicy,
    SelfTest,
    Statistic,
    TensorSpec,
    encode_manifest,
)
from archipel.bundle.reader import Bundle, verify_folder
from archipel.bundle.roles import Program
from archipel.durable import creating_folder, make_folder, reason_of
from archipel.errors import BundleError, TensorLayoutError


def parameter_specs(tensors: Mapping[str, np.ndarray], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The manifest's entries for the parameters `names`, whose values are in `tensors`.

    Raises TensorLayoutError for a name without values.

    Example:
        specs = parameter_specs({"bias": np.zeros(3, np.float32)}, ["bias"])
        print(specs[0].shape, specs[0].nbytes)  # (3,) 12
    """
    specs = []
    for name in names:
        if name not in tensors:
            raise TensorLayoutError(f"parameter {name!r} has no values among the bundle's tensors")
        array = np.asarray(tensors[name], order="C")
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        specs.append(TensorSpec(name=name, dtype=array.dtype.name, shape=array.shape, sha256=digest))  # type: ignore[arg-type]
    return tuple(specs)


def write_bundle(
    folder: Path | str,
    *,
    name: str,
    programs: Mapping[str, Program],
    graphs: Mapping[str, bytes],
    weights: bytes,
    parameters: tuple[TensorSpec, ...],
    limits: Limits,
    privacy: PrivacyPolicy,
    key: Ed25519PrivateKey,
    schedule: tuple[Phase, ...] = (),
    strategy: str = "",
    lineage: Lineage | None = None,
    self_test: tuple[SelfTest, bytes] | None = None,
    statistics: tuple[Statistic, ...] = (),
    sequence: int = 0,
    not_after: int = 0,
    populations: Sequence[str] = (),
    source: str = "",
    card: ModelCard | None = None,
) -> Bundle:
    """Write and sign a new bundle folder, all or nothing, and read it back verified.

    Arguments not named here are fields of Manifest.

    Arguments:
        folder: the new folder; its parents are made where they are missing.
        graphs: serialized ONNX by file name, of the programs and `source`, with external data in weights.safetensors
            only.
        weights: the contents of weights.safetensors, see `write_weights`.
        key: the publisher's private key.
        self_test: the manifest's entry, and the contents of its file.
        card: the model card, which becomes the file card.json.

    Returns:
        The written bundle, verified.

    Raises:
        CardError: the card is not well formed.
        BundleError: the folder exists or cannot be written, or validation refuses the manifest or a file.

    Example:
        old = open_bundle("digits.bundle", trusted_keys)
        graphs = {file: (old.folder / file).read_bytes() for file in old.manifest.files if file.endswith(".onnx")}
        kept = ("programs", "parameters", "limits", "privacy", "schedule")
        same = {name: getattr(old.manifest, name) for name in kept}
        weights = write_weights(old.parameters())
        newer = write_bundle("newer", name="digits", graphs=graphs, weights=weights, key=key, sequence=2, **same)
    """
    folder = Path(folder)
    if folder.exists():
        raise BundleError(f"{folder}: exists already; remove it or choose another name")
    contents: dict[str, bytes] = {**graphs, WEIGHTS_FILE: weights}
    if self_test is not None:
        contents[self_test[0].file] = self_test[1]
    if card is not None:
        contents[CARD_FILE] = encode_card(card)
    manifest = Manifest(
        format=FORMAT_VERSION,
        name=name,
        programs=dict(programs),
        parameters=parameters,
        limits=limits,
        privacy=privacy,
        files={path: hashlib.sha256(data).hexdigest() for path, data in contents.items()},
        schedule=schedule,
        strategy=strategy,
        lineage=lineage or Lineage(),
        self_test=None if self_test is None else self_test[0],
        statistics=statistics,
        sequence=sequence,
        not_after=not_after,
        populations=tuple(sorted(set(populations))),
        source=source,
    )
    manifest_bytes = encode_manifest(manifest)
    contents[MANIFEST_FILE] = manifest_bytes
    contents[SIGNATURE_FILE] = key.sign(manifest_bytes)
    try:
        make_folder(folder.parent)
        with creating_folder(folder, 0o755) as staging:
            for path, data in contents.items():
                with open(staging / path, "xb") as file:
                    file.write(data)
            # Before the folder gets its name: nobody finds a bundle that does not open.
            verify_folder(staging, [key.public_key().public_bytes_raw()], allow_development=True)
    except OSError as error:
        raise BundleError(f"{folder}: cannot be written ({reason_of(error)})") from error
    # Once more, because the bundle that was verified above has the paths of the staging folder.
    return verify_folder(folder, [key.public_key().public_bytes_raw()], allow_development=True)
