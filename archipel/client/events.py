"""What an agent tells the program that embeds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

EventName = Literal[
    "enrolled", "waiting", "paused", "resumed", "assigned", "trained", "advertised", "shared", "masked", "uploaded",
    "confirmed", "unmasked", "committed", "dropped", "refused", "rotated",
    "offered", "adopted", "kept", "set_aside",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that happened. `bytes_sent` and `bytes_received` are of bodies, in this round so far.

    `detail` depends on the name: "trained" has examples, steps, loss and seconds, "masked" the bytes to upload,
    "paused", "dropped" and "refused" the reason, "rotated" how often the key was replaced by now. "set_aside": the
    server takes this device into no round `until` then (UTC), for the reason; told when that changes.
    "offered", "adopted" and "kept" are about the `version` of a `model`: "adopted" has the version `before` it, "kept"
    the one that `runs` on (0: none), both the reason, and where the two were compared the `metric` with the values of
    the `offered` and the `running` one.
    """

    name: EventName
    device_id: str = ""
    round_id: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    detail: Mapping[str, str | float] = field(default_factory=dict)


OutcomeKind = Literal["waiting", "paused", "took_part", "dropped", "refused"]

OnEvent = Callable[[Event], object]


@dataclass(frozen=True)
class Outcome:
    """What one `run_once` came to. Bytes are of bodies; `wait` is in how many seconds to call again.

    "waiting": no round for this device now; "paused": conditions do not hold; "took_part": the round was committed
    with this device's update in it; "dropped": the device left a round, or the round failed; "refused": the plan is
    not one that this device carries out.
    """

    kind: OutcomeKind
    wait: float
    round_id: str = ""
    reason: str = ""
    examples: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
