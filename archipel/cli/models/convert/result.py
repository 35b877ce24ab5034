"""What `archipel convert` prints: what was made, and notes on what it decided on its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archipel.bundle import Bundle, SignedRelease
from archipel.cli.models.agreement import agreement_lines
from archipel.cli.models.convert.notes import made_by, note_lines
from archipel.cli.models.inspect import program_facts
from archipel.cli.models.update_text import update_lines
from archipel.lite_runtime.self_test import count_examples, describe_vectors


def bundle_result(bundle: Bundle, output: Path) -> dict[str, Any]:
    """What was made, as values for JSON."""
    manifest = bundle.manifest
    size = sum(path.stat().st_size for path in ([output] if output.is_file() else output.rglob("*")) if path.is_file())
    test = manifest.self_test
    vectors = None if test is None else describe_vectors(count_examples(bundle.folder / test.file), test.source)
    return {
        "output": str(output),
        "name": manifest.name,
        "bytes": size,
        "digest": bundle.digest,
        "programs": sorted(manifest.programs),
        "trains": "train" in {program.kind for program in manifest.programs.values()},
        "parameters": len(manifest.parameters),
        "self_test": vectors,
        "metrics": dict(manifest.lineage.metrics),
        "card": None if bundle.card is None else bundle.card.name,
        "notes": _notes(bundle),
    }


def release_notes(signed: SignedRelease) -> list[str]:
    """The notes of the release's best bundle; the others differ in what the recipe changed."""
    with tempfile.TemporaryDirectory() as cache:
        return _notes(signed.open(signed.release.variants[0].name, Path(cache)))


def _notes(bundle: Bundle) -> list[str]:
    programs = [program_facts(name, program, 0) for name, program in bundle.manifest.programs.items()]
    limits = [line for line in update_lines({"programs": programs}) if not line.startswith("hyperparameter")]
    return [*note_lines(made_by(bundle)), *limits, *_privacy(bundle)]


def _privacy(bundle: Bundle) -> list[str]:
    """What a round's noise is worth, of a bundle whose training adds noise in whole epochs."""
    manifest = bundle.manifest
    if not manifest.schedule or any(phase.epochs is None for phase in manifest.schedule):
        return []
    from archipel.client.memory.privacy import DELTA, epsilon, noise_of

    noise, rho = noise_of(manifest, "training", "", 1)
    if noise == "none":
        return []
    if not rho:
        return ["noise: its multiplier is not stated, so nobody can say what a round costs"]
    costs = ", ".join(f"{epsilon(rho * rounds):.3g} in {rounds} rounds" for rounds in (10, 100))
    return [f"noise: each example costs an epsilon of {epsilon(rho):.3g} in one round, {costs} (delta {DELTA:g})"]


def result_text(facts: Mapping[str, Any]) -> str:
    """The result of `bundle_result` as text."""
    metrics = facts["metrics"]
    lines = [f"{facts['output']}: {facts['name']!r}, {facts['bytes']:,} bytes, digest {facts['digest']}"]
    if "nbytes_before" in metrics:
        lines.append(f"predict: {metrics['nbytes_before']:,.0f} -> {metrics['nbytes_after']:,.0f} bytes")
    if "accuracy_before" in metrics:
        lines.append(f"accuracy: {100 * metrics['accuracy_before']:.2f} -> {100 * metrics['accuracy_after']:.2f} %")
    lines += agreement_lines(metrics)
    lines.append(f"self-test: {facts['self_test'] or 'without vectors; devices predict one example of zeros'}")
    lines.append(f"programs {', '.join(facts['programs'])}; {facts['parameters']} parameters")
    if facts["card"] is not None:
        lines.append(f"card: {facts['card']}")
    if not facts["trains"]:
        lines.append("it predicts only; with --loss devices can train it")
    return "\n".join([*lines, *(f"note: {note}" for note in facts["notes"])])
