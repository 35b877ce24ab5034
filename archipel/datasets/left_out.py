"""What a reader left out, where it was told to leave out what is damaged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from archipel.errors import DatasetError

OnBad = Literal["error", "skip"]
NAMED = 10


@dataclass
class LeftOut:
    """How many examples were left out, and what the first ten were: "train.csv, line 7: no value in column 'age'"."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, what: str) -> None:
        """Count an example, and note what it was if it is among the first."""
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(what)

    def __str__(self) -> str:
        if not self.count:
            return "nothing left out"
        return f"{self.count} left out: {'; '.join(self.first)}{'; ...' if self.count > len(self.first) else ''}"


def check_on_bad(on_bad: str) -> None:
    """Raise DatasetError for anything but "error" and "skip"."""
    if on_bad not in ("error", "skip"):
        raise DatasetError(f"on_bad must be 'error' or 'skip', got {on_bad!r}")
