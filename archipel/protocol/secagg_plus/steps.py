"""The order of a participant's steps: each once, and the last one again for what it was given before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from archipel.errors import SecureAggregationError
from archipel.protocol.secagg_plus.messages import Packed, pack, unpack
from archipel.protocol.secagg_plus.state import LEFT, State

M = TypeVar("M", bound=Packed)
_STEPS = ("advertise", "draw", "deal", "receive", "mask", "confirm", "answer", "done")


def take_once(state: State, name: str, given: bytes, kind: type[M], act: Callable[[], M]) -> M:
    """What `act` returns; where the step was done with the same `given`, what it has returned then."""
    digest = hashlib.sha256(given).digest()
    if (state.done, state.given) == (name, digest):
        return unpack(state.said, kind)
    with take_step(state, name):
        message = act()
        state.given, state.said = digest, pack(message)
        return message


@contextmanager
def take_step(state: State, name: str) -> Iterator[None]:
    """Around a step. Raises SecureAggregationError where another one is due; one that fails ends the participation."""
    if state.next != name:
        raise SecureAggregationError(f"step {name!r} in round {state.round_id}: expected {state.next!r}")
    # Before the step: an interrupted step cannot be repeated, such as `answer` to another question.
    state.next = LEFT
    try:
        yield
    except BaseException:
        state.forget()
        raise
    state.done, state.next = name, _STEPS[_STEPS.index(name) + 1]
    if name == "answer":
        state.forget()
