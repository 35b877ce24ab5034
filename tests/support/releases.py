"""A release of real bundles that differ in one number of their lineage, and so have files of one size."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Lineage, Release, Variant, open_bundle
from archipel.bundle.release import write_release
from tests.support.tiny_bundle import make_bundle


def make_release(folder: Path, key: Ed25519PrivateKey, names: tuple[str, ...] = ("float", "int8")) -> Release:
    """In the new folder. The lineage of each bundle has the variant's place, from 0, as the metric `place`."""
    folder.mkdir(parents=True)
    variants = []
    for place, name in enumerate(names):
        made = folder.parent / f"{folder.name}-{name}"
        made.mkdir()
        file = make_bundle(made, key, lineage=Lineage(metrics={"place": float(place)})).rename(
            folder / f"{name}.bundle"
        )
        data = file.read_bytes()
        digest = open_bundle(made / "tiny", [key.public_key().public_bytes_raw()], allow_development=True).digest
        variants.append(
            Variant(
                name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), digest=digest,
                peak_bytes=1000 - place, flops_per_example=24, accuracy=None if place else 0.75,
            )
        )  # fmt: skip
    release = Release(format=1, name="tiny", variants=tuple(variants))
    write_release(folder, release, key)
    return release
