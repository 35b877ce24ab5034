"""Releases in `convert`, `inspect` and `verify`: several bundles of one model, signed as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from archipel.bundle import Bundle, SignedRelease, Variant, open_release
from archipel.bundle.foreign import RELEASE_FILE
from archipel.bundle.release import RELEASE_SIGNATURE_FILE
from archipel.cli.input_output.publisher_keys import remedy_of, tell_development, trusted_keys
from archipel.cli.input_output.tables import table
from archipel.cli.models.agreement import agreement_lines
from archipel.cli.models.verify import Check
from archipel.errors import ArchipelError, BundleError, MissingExtraError, SignatureError


def open_signed(path: Path, key_files: Sequence[Path]) -> SignedRelease:
    """The release, its signature verified with one of the keys, or the user's development key where none is given.

    Raises CommandError, BundleError.
    """
    keys = trusted_keys(path, key_files)
    with remedy_of(key_files):
        signed = open_release(path, keys, allow_development=True)
    tell_development(signed.publisher)
    return signed


def release_text(signed: SignedRelease) -> str:
    """The release and a table of its variants, best first."""
    release = signed.release
    rows = [
        (f"{each.bytes:,}", f"{each.peak_bytes:,}", f"{each.flops_per_example:,}",
         "-" if each.accuracy is None else f"{100 * each.accuracy:.2f} %", each.name, each.digest[:16])
        for each in release.variants
    ]  # fmt: skip
    head = ("bytes", "memory", "FLOPs", "accuracy", "variant", "digest")
    return "\n".join(
        [
            f"release {release.name}  format {release.format}  digest {signed.digest}",
            f"{len(rows)} variants, best first; memory and FLOPs are of a prediction of one example",
            *(f"  {line}" for line in table(head, rows, numbers=4)),
        ]
    )


def release_facts(signed: SignedRelease) -> dict[str, Any]:
    """The release as values for JSON."""
    return {"kind": "release", "digest": signed.digest, **msgspec.to_builtins(signed.release)}


def made_text(signed: SignedRelease, folder: str) -> str:
    """As `release_text`, and how far each compressed variant agrees with its training form, by its lineage.

    `folder` is an existing folder that the bundles are unpacked below.
    """
    lines = [
        f"{each.name}: {line}"
        for each in signed.release.variants
        for line in agreement_lines(signed.open(each.name, folder).manifest.lineage.metrics)
    ]
    return "\n".join([release_text(signed), *lines])


def show_release(path: Path, key_files: Sequence[Path], as_json: bool) -> None:
    """What `archipel inspect` prints of a release."""
    signed = open_signed(path, key_files)
    if as_json:
        click.echo(json.dumps(release_facts(signed), allow_nan=False))
        return
    click.echo(release_text(signed))


def check_release(
    path: Path, key_files: Sequence[Path], folder: str, check: Callable[[Bundle], list[Check]]
) -> tuple[list[Check], SignedRelease | None]:
    """The checks of `archipel verify` of a release: its signature, its folder, and every bundle as if given by itself.

    Arguments:
        path: the folder of the release, with all its bundles.
        key_files: public keys of publishers; the signature of one of them is enough.
        folder: an existing folder that the bundles are unpacked below.
        check: makes the checks of each bundle's contents.

    Returns:
        The checks, and the release, which is None where its signature or its list is wrong.

    Raises:
        CommandError: no key was given. SignatureError: a key cannot be read.
    """
    try:
        signed = open_signed(path, key_files)
    except SignatureError as error:
        return [Check("signature", False, str(error))], None
    except BundleError as error:
        return [Check("release", False, str(error))], None
    variants = signed.release.variants
    checks = [
        Check("signature", True, "by one of the keys given"),
        Check("release", True, f"format {signed.release.format}, {len(variants)} variants"),
    ]
    known = {RELEASE_FILE, RELEASE_SIGNATURE_FILE, *(each.file for each in variants)}
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    text = f"{', '.join(others)}: not in the release; remove it" if others else "nothing that the release does not list"
    checks.append(Check("folder", not others, text))
    for variant in variants:
        found = _check(signed, variant, folder, check)
        checks += [replace(each, name=f"{variant.name}: {each.name}") for each in found]
    return checks, signed


def _check(
    signed: SignedRelease, variant: Variant, folder: str, check: Callable[[Bundle], list[Check]]
) -> Iterator[Check]:
    try:
        bundle = signed.open(variant.name, folder)
    except BundleError as error:
        yield Check("bundle", False, str(error))
        return
    yield Check("bundle", True, f"{variant.bytes:,} bytes, digest {bundle.digest}")
    yield from check(bundle)
    yield _check_costs(bundle, variant)


def _check_costs(bundle: Bundle, variant: Variant) -> Check:
    """What the release says of the memory and the FLOPs of `predict`, computed again."""
    try:
        import archipel.graph  # noqa: F401  (first: its error names the extra that is missing)
        from archipel.converter.variants import measure_predict

        peak, flops = measure_predict(bundle)
    except MissingExtraError as error:
        return Check("costs", None, f"not computed again: {error}")
    except ArchipelError as error:
        return Check("costs", False, f"cannot be computed: {error}")
    pairs = (("memory", variant.peak_bytes, peak), ("FLOPs", variant.flops_per_example, flops))
    low = [f"{name}: signed {said:,}, predict needs {need:,}" for name, said, need in pairs if said < need]
    if low:
        return Check("costs", False, f"too low: {'; '.join(low)}; convert the model again")
    return Check("costs", True, ", ".join(f"{name} {need:,} of {said:,}" for name, said, need in pairs))
