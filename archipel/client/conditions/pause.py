"""The owner's pause: a file in the device's folder, which a running agent checks whenever it checks its conditions."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from archipel.durable import remove_durably, write_durably
from archipel.errors import ClientError, MessageError
from archipel.protocol.sealed import decode, encode

PAUSE_FILE = "paused"
_MAX_BYTES = 1024


class _Pause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`until`: Unix seconds by the device's clock; None: until `resume`."""

    until: float | None = None


def pause(folder: Path, until: float | None = None) -> None:
    """Stop the device's work at the next training step. Durable when it returns.

    Arguments:
        folder: the device's folder; its agent may be running in another process.
        until: when the pause ends, in Unix seconds by the device's clock; None: with `resume`.

    Raises:
        ClientError: there is no such folder, or it cannot be written.

    Example:
        pause(Path("device"), until=time.time() + 7200)
    """
    try:
        write_durably(folder / PAUSE_FILE, encode(_Pause(until=until)))
    except OSError as error:
        raise ClientError(f"{folder}: cannot be paused ({error.strerror}); is it a device's folder?") from None


def resume(folder: Path) -> bool:
    """End the pause of the device in `folder`; returns whether there was one. Durable when it returns.

    Example:
        resume(Path("device"))
    """
    return remove_durably(folder / PAUSE_FILE)


def paused(folder: Path, clock: Callable[[], float] = time.time) -> str:
    """Empty if the device is not paused, else one line for the owner, with the end of the pause.

    `clock` gives Unix seconds. A file that cannot be read counts as a pause: a damaged disk must not end it.

    Example:
        print(paused(Path("device")))
    """
    path = folder / PAUSE_FILE
    try:
        with open(path, "rb") as file:
            pause = decode("pause", file.read(_MAX_BYTES), _Pause)
    except FileNotFoundError:
        return ""
    except (OSError, MessageError):
        return f"paused by its owner ({path} cannot be read; `archipel device resume` removes it)"
    if pause.until is None:
        return "paused by its owner"
    if clock() >= pause.until:
        return ""
    return f"paused by its owner until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(pause.until))}"
