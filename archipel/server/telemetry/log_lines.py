"""Log lines as text or as JSON, with the request or round that they are about."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
_NOTHING: Mapping[str, str] = {}
_about: ContextVar[Mapping[str, str]] = ContextVar("about", default=_NOTHING)
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160), 0x2028, 0x2029)}

_SEPARATORS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Line breaks that JSON allows in a string; some readers take them for the end of the line."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a log in JSON. `time` is in Unix seconds, `error` a traceback; ids are of what it is about."""

    time: float
    level: str
    logger: str
    message: str
    request_id: str = ""
    round_id: str = ""
    error: str = ""


def set_about(**ids: str) -> None:
    """Say what all further lines of this thread are about: `request_id`, `round_id`; nothing without any."""
    _about.set(ids)


@contextmanager
def about(**ids: str) -> Iterator[None]:
    """The same for the lines of a block."""
    before = _about.set(ids)
    try:
        yield
    finally:
        _about.reset(before)


class JsonLines(logging.Formatter):
    """One JSON object for each record, and one line."""

    def format(self, record: logging.LogRecord) -> str:
        error = "" if not record.exc_info else self.formatException(record.exc_info)
        line = Line(
            time=round(record.created, 3),
            level=record.levelname.lower(),
            logger=record.name,
            message=record.getMessage(),
            error=error,
            **_about.get(),
        )
        return msgspec.json.encode(line).decode().translate(_SEPARATORS)


class TextLines(logging.Formatter):
    """One line for people; a traceback follows on lines of its own, which are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        # A message with a line break could pretend to be two.
        ids = "".join(f" [{name} {value}]" for name, value in _about.get().items() if value not in record.message)
        return super().formatMessage(record).translate(_CONTROLS) + ids

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"    {line.translate(_CONTROLS)}" for line in text.split("\n"))


def formatter(log_format: LogFormat) -> logging.Formatter:
    """The formatter of the setting `log_format`."""
    return JsonLines() if log_format == "json" else TextLines()


def write_log(log_format: LogFormat, level: int) -> None:
    """Have this process's log from `level` on written to standard error, which the supervisor keeps in server.log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def single_line(log_format: LogFormat, logger: str, message: str) -> str:
    """One line of a process that logs by itself, the supervisor."""
    record = logging.LogRecord(logger, logging.WARNING, "", 0, message, (), None)
    record.created = time.time()
    return formatter(log_format).format(record)
