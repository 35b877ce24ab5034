"""Whether this device took an offered version, as an answer that may be counted: FOLDER/decisions.json.

A device's decision is a fact about its examples, so the answer gets noise before it leaves the device, even into a
secure sum: a server that offers a version to one device of twenty knows what the other nineteen add. The device gives
the true answer with a probability of 3/4 and the opposite otherwise (randomized response, Warner 1965), which is
differentially private with epsilon = ln 3 against everybody.

The device draws the answer once for each version, when it has decided, and keeps it: repeated questions reveal nothing
more, and it does not change if the device gives the version up later. A version is identified by its content, so the
same version under another number gets the same answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from archipel.client.memory.stored import read_stored
from archipel.durable import write_durably
from archipel.protocol.sealed import encode
from archipel.protocol.uploads import TRUTHFUL

FILE = "decisions.json"
MAX_DECISIONS = 512
"""A device answers for no more versions than this: it would have to draw a forgotten answer anew."""
_MAX_BYTES = 256 << 10
_REMEDY = "remove it: the device counts in no adoption that it has decided about before"

ContentKey = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}:([0-9a-f]{64})?$(?!\\n)", max_length=129)]


class _Decisions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    answers: Annotated[dict[ContentKey, bool], msgspec.Meta(max_length=MAX_DECISIONS)] = {}


def content_key(bundle: str, weights: str | None) -> str:
    """The key of a version: the digests of its bundle and of its weights, None for the bundle's own."""
    return f"{bundle}:{weights or ''}"


def draw_answer(taken: bool, below: Callable[[int], int] = secrets.randbelow) -> bool:
    """`taken` with a probability of 3/4, else its opposite. `below(n)` gives a random number from 0 to n - 1."""
    return taken if below(4) < 4 * TRUTHFUL else not taken


class DecisionBook:
    """The noisy answers of one device. Every change is durable when it returns."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def record(self, key: str, taken: bool) -> None:
        """Draw and store the answer for a version that the device has decided about, unless there is one.

        Beyond MAX_DECISIONS versions it draws nothing. Raises ClientError if the file is damaged, OSError if it cannot
        be written.
        """
        answers = self._read()
        # Never a second draw: the average of many answers would reveal the true one.
        if key in answers or len(answers) >= MAX_DECISIONS:
            return
        write_durably(self._path, encode(_Decisions(answers={**answers, key: draw_answer(taken)})))

    def answer(self, key: str) -> bool | None:
        """The noisy answer; None if the device has not decided. Raises ClientError if the file is damaged."""
        return self._read().get(key)

    def _read(self) -> dict[str, bool]:
        stored = read_stored(self._path, _MAX_BYTES, "record of decisions", _Decisions, _REMEDY)
        return {} if stored is None else stored.answers
