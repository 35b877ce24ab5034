"""Keeps numbers of devices from telling what a single device reports about itself.

An operator who writes an expression over attributes learns from every number that depends on it: how many devices wait,
run a version, or are enough for a task to start. So such numbers are rounded down to multiples of the setting
`smallest_answer`, and below it are not given at all. A task with an expression needs at least so many devices, and the
devices in its rounds are shown under pseudonyms.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from archipel.errors import ServerError
from archipel.protocol.eligibility import parse_eligibility


def reads_attributes(eligibility: str) -> bool:
    """Whether the expression, which was checked before, reads any attribute."""
    return bool(parse_eligibility(eligibility).names)


def hides(eligibility: str, smallest: int) -> bool:
    """Whether numbers that depend on the expression must be rounded. With a `smallest` of 1 none are."""
    return smallest > 1 and reads_attributes(eligibility)


def check_enough(eligibility: str, devices: int, setting: str, smallest: int) -> None:
    """Raise ServerError if a task with that expression could begin with fewer devices than `smallest`.

    `setting` names the number `devices` in the message. Raises EligibilityError for an invalid expression.
    """
    if reads_attributes(eligibility) and devices < smallest:
        raise ServerError(
            f"{setting}: {devices} is below {smallest} (the server's smallest_answer), the fewest for a task with an "
            "eligibility: whether it starts must not tell what one device says of itself"
        )


def round_down(count: int, smallest: int) -> int | None:
    """The number that may be shown: rounded down to a multiple of `smallest`; None below it."""
    return None if count < smallest else count - count % smallest


def pseudonym(key: bytes, round_id: str, device_id: str) -> str:
    """A name for a device in one round, 32 hexadecimal digits, that only the owner of the server's key can compute."""
    # Another one in each round, so that rounds with different expressions cannot be compared device by device.
    return hmac.digest(key, f"{round_id}{device_id}".encode(), hashlib.sha256).hex()[:32]


def rename_devices(text: str, key: bytes, round_id: str) -> str:
    """The text with the pseudonym of each device in the place of its id."""
    return _ID.sub(lambda found: pseudonym(key, round_id, found[0]), text)


_ID = re.compile(r"\b[0-9a-f]{32}\b")
