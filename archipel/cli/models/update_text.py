"""What limits a device's update, and which defaults of a round change its result, as text for `archipel inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def update_lines(facts: Mapping[str, Any]) -> list[str]:
    """Of the result of `bundle_facts`; none for a bundle without training."""
    finish = next((each for each in facts["programs"] if each["kind"] == "finish"), None)
    if finish is None:
        return []
    updates = [port for port in finish["outputs"] if port["role"] == "update"]
    deltas = [port for port in updates if port["kind"] == "delta"]
    weight = next((port for port in updates if port["kind"] == "weight"), None)
    lines = [f"update: {_clip(finish, deltas[0])}"] if deltas else []
    if deltas:
        lines.append(
            f"rounding: an element of an update is at most {deltas[0]['range']:.4g}, in {deltas[0]['bits']} bits"
        )
    if weight is None:
        lines.append("weighting: every device weighs 1")
    elif weight.get("lowest"):
        cap = weight["range"] / weight["lowest"]
        lines.append(f"weighting: by examples; a device with {cap:.6g} or more weighs 1 (weight_cap)")
    programs = [each for each in facts["programs"] if each["kind"] in ("train", "finish") and each["steps"] == 1]
    found = {port["name"]: port for each in programs for port in each["inputs"] if port["role"] == "hyperparameter"}
    lines += [
        f"hyperparameter: {name} {port['default']:.6g}, a task may set {port['minimum']:.4g} to {port['maximum']:.4g}"
        for name, port in found.items()
    ]
    reported = {port["name"]: port["range"] for each in programs for port in each["outputs"] if port.get("range")
                and port["role"] == "metric"}  # fmt: skip
    names = ", ".join(f"{name} (up to {bound:g})" for name, bound in reported.items())
    return [*lines, f"rounds report: {names or 'no metrics'}"]


def _clip(finish: Mapping[str, Any], delta: Mapping[str, Any]) -> str:
    if delta.get("clip") is None:
        return "not clipped"
    adapted = next((port for port in finish["inputs"] if port["name"] == "update_clip"), None)
    if adapted is None:
        return f"clipped to a norm of {delta['clip']:.4g} in every round"
    return (
        f"clipped to a norm of {adapted['default']:.4g} at first, which the server adapts to what devices report, "
        f"up to {delta['clip']:.4g}"
    )
