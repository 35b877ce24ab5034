"""What was done with private data, as plain data: an account is a list of events.

An event says how much noise hid one unit of privacy, and whether that unit was drawn by chance. It does not say what a
unit is (an example, a device): whoever keeps the account says that, and puts events of one kind of unit alone into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from archipel.errors import MessageError
from archipel.protocol.messages import Message

MAX_EVENTS = 100_000
"""Events of one account; `Repeated` stands for many equal ones."""
_BYTES_PER_EVENT = 256


class Gaussian(Message, frozen=True, kw_only=True, tag="gaussian"):
    """Gaussian noise on a sum, of a standard deviation of `noise_multiplier` times the most that one unit can change
    the sum by, in the L2 norm.

    Example:
        events = [Gaussian(noise_multiplier=10.0)] * 100
    """

    noise_multiplier: Annotated[float, Meta(gt=0, le=1e9)]


class Poisson(Message, frozen=True, kw_only=True, tag="poisson"):
    """`event` over a sample that each unit is in with `probability`, independently of all others and in secret.

    It is cheaper than the event itself only because of that chance: rounds whose devices are whoever is there are none.

    Example:
        step = Poisson(probability=0.01, event=Gaussian(noise_multiplier=1.1))
    """

    probability: Annotated[float, Meta(gt=0, le=1)]
    event: Gaussian


class Repeated(Message, frozen=True, kw_only=True, tag="repeated"):
    """`event`, `count` times, each with randomness of its own.

    Example:
        rounds = Repeated(event=Gaussian(noise_multiplier=10.0), count=100)
    """

    event: Gaussian | Poisson
    count: Annotated[int, Meta(ge=1, le=1_000_000_000)]


Event = Gaussian | Poisson | Repeated
_DECODER: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(Annotated[list[Event], Meta(max_length=MAX_EVENTS)])


def write_events(events: Sequence[Event]) -> bytes:
    """The account as JSON, which `read_events` reads.

    Example:
        data = write_events([Gaussian(noise_multiplier=10.0)])
    """
    return msgspec.json.encode(list(events))


def read_events(data: bytes) -> list[Event]:
    """The events of an account.

    Raises MessageError for anything that `write_events` does not write: other fields or kinds, numbers out of bounds,
    more than MAX_EVENTS events.

    Example:
        events = read_events(write_events([Gaussian(noise_multiplier=10.0)]))
    """
    if len(data) > _BYTES_PER_EVENT * MAX_EVENTS:
        raise MessageError(f"events: {len(data)} bytes are more than {MAX_EVENTS} events can have")
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"events: {error}") from None
