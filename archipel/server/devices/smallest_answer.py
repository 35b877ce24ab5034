"""What devices tell about themselves is shown to nobody, and must not be counted down to one of them either.

Whoever may write an expression over attributes learns from each number that depends on it: how many devices wait, run
a version, or are enough for a task to start. So such numbers are told in steps of the setting `smallest_answer`, and
below it only as that; such a task needs as many devices; and who was in its rounds is told under other names.
"""

from __future__ import annotations

import hashlib
import hmac

from archipel.errors import ServerError
from archipel.protocol.eligibility import parse_eligibility


def reads_attributes(eligibility: str) -> bool:
    """Whether the (checked) expression asks for anything."""
    return bool(parse_eligibility(eligibility).names)


def hides(eligibility: str, smallest: int) -> bool:
    """Whether numbers that depend on the expression are not told as they are. With a `smallest` of 1 all are."""
    return smallest > 1 and reads_attributes(eligibility)


def check_enough(eligibility: str, devices: int, setting: str, smallest: int) -> None:
    """Raises ServerError where a task with that expression could begin with fewer devices than `smallest`.

    Raises EligibilityError for an expression that is none.
    """
    if reads_attributes(eligibility) and devices < smallest:
        raise ServerError(
            f"{setting}: {devices} is below {smallest} (the server's smallest_answer), the fewest for a task with an "
            "eligibility: whether it starts must not tell what one device says of itself"
        )


def told(count: int, smallest: int) -> int | None:
    """The number to be told: rounded down to a multiple of `smallest`; None below it."""
    return None if count < smallest else count - count % smallest


def pseudonym(key: bytes, round_id: str, device_id: str) -> str:
    """Another name for a device in one round: 32 hexadecimal digits, which only the server can make or undo."""
    return hmac.digest(key, f"{round_id}{device_id}".encode(), hashlib.sha256).hex()[:32]
