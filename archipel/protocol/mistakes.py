"""Tells all mistakes at once: several texts as one, and back.

One mistake is its text. Several are the text "2 mistakes" and a line for each, two blanks in front; what a text has in
further lines stands four blanks in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from archipel.errors import ArchipelError

MOST = 50
"""Mistakes that a text has; of more it says how many they are."""
_HEAD = re.compile(r"\d+ mistakes\n  (?=\S)")
_NEXT = re.compile(r"\n  (?=\S)")


def tell(texts: Sequence[str]) -> str:
    """One text of one or more; those that are of several mistakes themselves are taken apart first. In their order,
    each once."""
    every = list(dict.fromkeys(each for text in texts for each in split(text)))
    if len(every) == 1:
        return every[0]
    lines = [text.replace("\n", "\n    ") for text in every[:MOST]]
    if len(every) > MOST:
        lines.append(f"and {len(every) - MOST} more")
    return "\n  ".join([f"{len(every)} mistakes", *lines])


def split(text: str) -> list[str]:
    """The mistakes of which `tell` made the text."""
    head = _HEAD.match(text)
    if head is None:
        return [text]
    return [each.replace("\n    ", "\n") for each in _NEXT.split(text[head.end() :])]


class Mistakes:
    """Collects the errors of checks that do not depend on each other.

    Example:
        mistakes = Mistakes()
        with mistakes.collected():
            check_one()
        with mistakes.collected():
            check_other()
        mistakes.tell(SimulationError)
    """

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def add(self, error: Exception) -> None:
        """Keep it."""
        self._errors.append(error)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A context: an ArchipelError or ValueError in it is kept, and the code after the block goes on."""
        try:
            yield
        except (ArchipelError, ValueError) as error:
            self._errors.append(error)

    @property
    def texts(self) -> list[str]:
        """Those of the errors that were kept, in their order."""
        return [str(error) for error in self._errors]

    def tell(self, kind: type[Exception]) -> None:
        """Raise the one error that was kept as it is, or one of this kind with all of them; none: return."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise kind(tell(self.texts))
