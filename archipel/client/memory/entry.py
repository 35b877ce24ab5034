"""The journal's entry of one round."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from archipel.protocol.messages import Digest, Kind, RoundId, ServerNoise

Step = Literal["assigned", "advertising", "sharing", "complaining", "masked", "confirming", "unmasking", "closed"]
Result = Literal["", "took_part", "dropped", "refused"]
Noise = Literal["unknown", "none", "added"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What this device did in one round.

    step             the last step that has begun
    started, changed Unix seconds
    plan, bundle     SHA-256 of the plan and of the bundle's manifest
    masked           SHA-256 of the update as it is sent; None: there was none to send yet
    state            the file that gets the device's new state if the round is committed; empty: none
    result, reason   how the round ended for this device, and why
    sent, received   bytes of bodies
    buffered         an update that the server has taken counts whatever becomes of the round
    model            the bundle's name
    cohort           how many devices' updates are in the sum; 0: the device was not told
    steps            the steps of its training
    noise, rho       whether this device added noise for differential privacy, and what that costs one example
                     (privacy.py; 0: not stated)
    stated           what the server says of noise of its own, in the plan that it signed; None: nothing
    origin           the round of the root server that this round is a part of, in a tree of servers
    resumes          all that the round needs is kept beside the entry (kept.py), so that it goes on after a restart

    Example:
        with Agent(AgentConfig(folder=Path("phone")), examples=lambda: {"x": x, "y": y}) as agent:
            for entry in agent.rounds:
                print(entry.model, entry.result, entry.sent, "bytes sent")
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
    resumes: bool = False
    stated: ServerNoise | None = None
    origin: RoundId | None = None
