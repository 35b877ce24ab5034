"""Variants: several bundles of one model, for devices of different sizes, signed as one release."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from archipel.bundle import Bundle, ModelCard, PrivacyPolicy, Release, SignedRelease, Variant, open_release, pack
from archipel.bundle.release import MAX_VARIANTS, RELEASE_FORMAT, check_variant_name, write_release
from archipel.compression import FineTune, PruneChannels, StaticInt8
from archipel.compression.examples import Data
from archipel.compression.part import Part
from archipel.compression.stored import read_stored
from archipel.compression.work import Progress
from archipel.converter.limits import compute_limits
from archipel.converter.options import Analysis, Compression, Signing, Training
from archipel.converter.pipeline import make_bundle, naming_target
from archipel.converter.request import DEFAULT_PRIVACY, SUFFIX, Request
from archipel.converter.sources import read_model
from archipel.converter.validation import check_request
from archipel.durable import creating_folder, make_folder, temporary_folder
from archipel.errors import CompressionError, ConversionError
from archipel.lite_runtime.agreement import MIN_AGREEMENT, MIN_SNR
from archipel.training.step_engines import ONNX_RUNTIME

PRESETS = ("float", "int8", "small")
"""The variants that `variant_recipes` knows, from the best to the smallest."""
SMALL: tuple[Part, ...] = (PruneChannels(flops=0.5, fine_tune=FineTune(epochs=3)), StaticInt8())


def variant_recipes(
    names: Sequence[str] = PRESETS,
    *,
    data: Data | None = None,
    calibration: Data | None = None,
    validation: Data | None = None,
    small: Sequence[Part] | str | os.PathLike[str] = SMALL,
    seed: int = 0,
    engine: str = ONNX_RUNTIME,
    folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Compression | None]:
    """The usual variants for `convert_variants`, from the best to the smallest, whatever the order of `names`.

    Arguments:
        names: of "float", the model as it is; "int8", which rounds weights and activations to 8 bits and needs
            examples (`calibration` or `data`); and "small", from whose channels half of the FLOPs are removed before it
            is trained again and rounded, which needs labelled training examples (`data`).
        data, calibration, validation, seed, engine, on_progress: as for Compression.
        small: another recipe for "small".
        folder: keeps the progress of each variant in a folder of its name, as for Compression.

    Raises:
        ConversionError: for a wrong name, or a variant whose examples are missing.

    Example:
        convert_variants(model, "digits", variants=variant_recipes(data=(x, y)), signing=Signing(key))
    """
    if isinstance(names, str) or not names or len(set(names)) != len(names) or not set(names) <= set(PRESETS):
        raise ConversionError(
            f"variants: expected some of {', '.join(PRESETS)}, each at most once, got "
            f"{names if isinstance(names, str) else ', '.join(map(str, names)) or 'none'}"
        )
    made: dict[str, Compression | None] = {}
    for name in sorted(names, key=PRESETS.index):
        if name == "float":
            made[name] = None
            continue
        with _naming(name):
            made[name] = Compression(
                [StaticInt8()] if name == "int8" else small,
                data=data, calibration=calibration, validation=validation, seed=seed, engine=engine,
                folder=None if folder is None else Path(folder) / name, on_progress=on_progress,
            )  # fmt: skip
    return made


def convert_variants(
    source: Any,
    path: str | os.PathLike[str],
    *,
    signing: Signing,
    variants: Mapping[str, Compression | None],
    training: Training | None = None,
    analysis: Analysis | None = None,
    example: Any = None,
    name: str | None = None,
    privacy: PrivacyPolicy = DEFAULT_PRIVACY,
    self_test: Mapping[str, np.ndarray] | None = None,
    min_agreement: float = MIN_AGREEMENT,
    min_snr: float = MIN_SNR,
    card: ModelCard | None = None,
) -> SignedRelease:
    """Make a bundle for each variant of a model, and one signed release of them all.

    A device takes the first variant that fits its owner's limits (`lite_runtime.choose`), so the release lists them
    from the best to the worst: by the accuracy of `predict` where all have a `validation`, and otherwise in the order
    of `variants`.

    Arguments:
        path: the new folder of the release, with release.json, its signature, and NAME.bundle for each variant. It
            appears when all of it is there.
        variants: how each is compressed, by its name; None: not at all. `variant_recipes` makes the usual ones.
        source, signing, training, analysis, example, name, privacy, self_test, card: as for `convert`; all bundles have
            them alike, and one name.
        min_agreement, min_snr: as for `convert`, of each variant.

    Returns:
        The release, its signature verified.

    Raises:
        ConversionError: an argument is wrong. The arguments for all variants are checked before any is made.
        ArchipelError: the error of the part that failed.

    Example:
        variants = {"float": None, "int8": Compression([StaticInt8()], calibration=images)}
        release = convert_variants(model, "release", variants=variants, signing=Signing(key))
    """
    return make_release(
        Request(
            source,
            path,
            signing,
            training,
            analysis,
            None,
            example,
            name,
            privacy,
            self_test,
            min_agreement,
            min_snr,
            card,
        ),
        variants,
    )


def make_release(request: Request, variants: Mapping[str, Compression | None]) -> SignedRelease:
    """Do what `convert_variants` does. `request` has no compression; its path is the release's folder."""
    check_request(request)
    path = Path(request.path)
    if path.suffix == SUFFIX:
        raise ConversionError(f"{path}: a release is a folder of several bundles; name it without {SUFFIX}")
    if not 1 <= len(variants) <= MAX_VARIANTS:
        raise ConversionError(f"variants: expected 1 to {MAX_VARIANTS}, got {len(variants)}")
    requests = {}
    for name, compression in variants.items():
        check_variant_name(name)
        requests[name] = dataclasses.replace(request, name=request.bundle_name, compression=compression)
        with _naming(name):
            check_request(requests[name])
    model = read_model(request.source, request.example)
    make_folder(path.parent)
    with (
        naming_target(path),
        creating_folder(path, 0o755) as staging,
        temporary_folder(path) as folder,
    ):
        made: list[tuple[Variant, dict[str, float]]] = []
        for name, each in requests.items():
            with _naming(name):
                bundle = make_bundle(dataclasses.replace(each, source=model, path=folder / name))
            file = staging / f"{name}{SUFFIX}"
            pack(bundle.folder, file)
            made.append((_describe(name, bundle, file), dict(bundle.manifest.lineage.metrics)))
            shutil.rmtree(bundle.folder)
        release = Release(format=RELEASE_FORMAT, name=request.bundle_name, variants=_best_first(made, variants))
        write_release(staging, release, request.signing.key)
    return open_release(path, [request.signing.key.public_key().public_bytes_raw()], allow_development=True)


def _describe(name: str, bundle: Bundle, file: Path) -> Variant:
    with open(file, "rb") as opened:
        digest = file_digest(opened, "sha256").hexdigest()
    needs = measure_predict(bundle)
    return Variant(
        name=name, bytes=file.stat().st_size, sha256=digest, digest=bundle.digest,
        peak_bytes=needs[0], flops_per_example=needs[1],
    )  # fmt: skip


def measure_predict(bundle: Bundle) -> tuple[int, int]:
    """Bytes of memory and FLOPs that `predict` of the bundle needs for one example. Raises ConversionError.

    The manifest's limits are those of all programs, which training decides, and so are alike for most variants.
    """
    program = next(name for name, each in bundle.manifest.programs.items() if each.kind == "predict")
    model = read_stored(bundle.program_path(program))
    model.signature = bundle.program(program)
    limits = compute_limits({program: model}, 1)
    return limits.peak_bytes, limits.flops_per_example


def _best_first(
    made: Sequence[tuple[Variant, Mapping[str, float]]], variants: Mapping[str, Compression | None]
) -> tuple[Variant, ...]:
    """By accuracy, where every variant's is known; that of the model as it is was measured before a compression."""
    before = next((metrics["accuracy_before"] for _, metrics in made if "accuracy_before" in metrics), None)
    found = []
    for variant, metrics in made:
        accuracy = before if variants[variant.name] is None else metrics.get("accuracy_after")
        found.append(msgspec.structs.replace(variant, accuracy=accuracy))
    if all(variant.accuracy is not None for variant in found):
        found.sort(key=lambda variant: -(variant.accuracy or 0.0))
    return tuple(found)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except (CompressionError, ConversionError) as error:
        raise ConversionError(f"variant {name!r}: {error}; or leave this variant out") from error
