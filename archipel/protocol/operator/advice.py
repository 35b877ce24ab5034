"""What an operator can do about a round that failed: docs/failed-rounds.md in one sentence for each cause."""

from __future__ import annotations

import re
from collections.abc import Mapping

OF_REASONS: Mapping[str, str] = {
    "cohort": "their owners ask for larger rounds: raise `min_cohort`",
    "kind": "their owners allow no tasks of this kind: the task needs other devices",
    "pace": "their owners allow fewer rounds a day: raise `rest_seconds`, or bring more devices",
    "population": "their owners allow other populations only: compare the task's population with their settings",
    "privacy": "their owners allow no plain rounds, or less epsilon: take `privacy = \"secure\"`, or more noise",
    "publisher": "their owners accept other publishers only, or no development key: sign with a key that tokens name",
    "size": "the bundle, the weights or the update are too large for them: a smaller model, `lora`, or `compress`",
    "policy": "the plan is outside the publisher's policy: compare the task with `archipel inspect BUNDLE`",
    "bundle": "the bundle is damaged, or fails its self-test there: `archipel verify BUNDLE` on such a device",
    "data": "their examples do not fit the model: a device's own log names the field; compare `archipel inspect`",
    "diverged": "their loss became no finite number: a smaller `lr`, or inputs of like sizes",
    "other": "that device's own log says why: `archipel device status`",
    "untold": "their owners do not tell why; that device's own log does: `archipel device status`",
}  # fmt: skip
"""By what devices gave as their reason (LeaveReason), and for those that gave none."""

_OF_PHASES: Mapping[str, str] = {
    "assigning": "devices that waited did not come for the round: look at their power and network",
    "advertising": "devices went away or trained too long: bring them back, lower `min_cohort`, or raise "
                   "`deadlines.advertising`",
    "sharing": "devices went away after they had trained: look at their network and their owners' conditions",
    "complaining": "devices went away after they had trained: look at their network and their owners' conditions",
    "masking": "devices went away, or upload too slowly: `compress`, or a longer `deadlines.masking`",
    "confirming": "devices went away at the end: a longer `deadlines.confirming`",
    "unmasking": "devices went away at the end: a longer `deadlines.unmasking`",
    "updating": "devices went away, or train or upload too slowly: a longer `deadlines.updating`",
    "buffering": "devices went away, or train or upload too slowly: a longer `deadlines.buffering`",
}  # fmt: skip
_MISSED = re.compile(r"by the deadline of phase ([a-z]+)")


def advise_on_failure(reason: str) -> str:
    """What to do about a round that failed for this reason, or a task with this last failure; empty: not known.

    Example:
        advise_on_failure("2 masked updates arrived by the deadline of phase masking, 3 needed")
        # 'devices went away, or upload too slowly: `compress`, or a longer `deadlines.masking`'
    """
    if " left the round in phase " in reason:
        return "look at what the devices gave as their reason"
    match = _MISSED.search(reason)
    return "" if match is None else _OF_PHASES.get(match[1], "")


def advise_on_reason(reason: str) -> str:
    """What to do about devices that gave this as their reason; empty: not known."""
    return OF_REASONS.get(reason, "")


def advise_on_refusals(refused: Mapping[str, int]) -> dict[str, str]:
    """What to do about what devices gave as their reasons, by reason: what most of them said comes first."""
    ordered = sorted(refused, key=lambda reason: -refused[reason])
    return {reason: OF_REASONS[reason] for reason in ordered if reason in OF_REASONS}
