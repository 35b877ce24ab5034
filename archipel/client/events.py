"""What an agent tells the program that embeds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from archipel.client.config import AgentConfig

EventName = Literal[
    "enrolled", "waiting", "paused", "resumed", "assigned", "trained", "advertised", "shared", "masked", "uploaded",
    "confirmed", "unmasked", "committed", "dropped", "refused", "rotated",
    "offered", "adopted", "kept", "set_aside",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that happened. `bytes_sent` and `bytes_received` count bodies in this round so far; `round_id` is ""
    outside of rounds.

    `detail` depends on the name:

        trained          `examples`, `steps`, `loss` and `seconds`
        masked           `bytes` to upload
        waiting          `retry_after`: seconds until it comes again; a `reason` where that is its own
        paused, dropped, refused   the `reason`
        rotated          `number`: how often the key was replaced so far
        set_aside        the server takes this device into no round `until` that time (UTC), with the `reason`; emitted
                         when either changes
        offered          a `version` of a `model`
        adopted, kept    the same with the `reason`; `before` is the version that "adopted" replaces, `runs` the one
                         that goes on running after "kept" (0: none). If the two were compared: the `metric`, and its
                         values for the `offered` and the `running` version

    Example:
        def on_event(event):
            if event.name == "trained":
                print(event.detail["examples"], "examples in", event.detail["seconds"], "seconds")

        agent = Agent(AgentConfig(folder=Path("phone")), examples=lambda: {"x": x, "y": y}, on_event=on_event)
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
    """The result of one `run_once`. `wait`: after how many seconds to call again. Bytes count bodies; `examples` are
    those that the device trained on; `reason` says why in one line.

    `kind`:

        waiting      there is no round for this device now
        paused       the owner's conditions do not hold
        took_part    the round was committed with this device's update in it
        dropped      the device left a round, or the round failed
        refused      the device does not carry out the plan that it got

    Example: see `archipel.client.Agent`.
    """

    kind: OutcomeKind
    wait: float
    round_id: str = ""
    reason: str = ""
    examples: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


def traced(config: AgentConfig, on_event: OnEvent | None) -> OnEvent | None:
    """`on_event`, which also has spans of rounds sent where the owner has set an address for them."""
    if not config.otlp_address:
        return on_event
    from archipel.client.round_trace import RoundTrace  # here, because OpenTelemetry is an extra

    return RoundTrace(config.otlp_address, on_event)
