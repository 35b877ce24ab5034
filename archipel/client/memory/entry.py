"""What the journal says of one round."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from archipel.protocol.messages import Digest, Kind, RoundId

Step = Literal["assigned", "advertising", "sharing", "complaining", "masked", "confirming", "unmasking", "closed"]
Result = Literal["", "took_part", "dropped", "refused"]
Noise = Literal["unknown", "none", "added"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round. `step` is the last one begun; `sent` and `received` are bytes of bodies, times Unix seconds.

    `model` is the bundle's name. `cohort` is how many devices' updates are in the sum, 0 where the device was not told;
    `steps` are those of its training. `noise`: whether this device added some for differential privacy, and with `rho`
    how much that protects one example (client.privacy; 0: not stated). `state` is the name of the file that the
    device's new state goes to if the round is committed. In a `buffered` round an update that was taken counts,
    whatever becomes of the round.
    """

    round_id: RoundId
    task_id: RoundId
    number: int
    plan: Digest
    bundle: Digest
    step: Step
    started: float
    changed: float
    masked: Digest | None = None
    state: str = ""
    result: Result = ""
    reason: str = ""
    examples: int = 0
    sent: int = 0
    received: int = 0
    buffered: bool = False
    kind: Kind = "training"
    privacy: Literal["secure", "plain"] = "secure"
    model: str = ""
    cohort: int = 0
    steps: int = 0
    noise: Noise = "unknown"
    rho: Annotated[float, msgspec.Meta(ge=0)] = 0.0
