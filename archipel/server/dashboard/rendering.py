"""Templates: the environment, and how numbers, times and ids are written for people."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from archipel import __version__
from archipel.insight_page import script, styles
from archipel.protocol.operator.advice import advise_on_failure, advise_on_reason
from archipel.server.dashboard.desk import Desk

HERE = Path(__file__).parent
STATIC = HERE / "static"
NAVIGATION = (
    ("/dashboard/", "Overview", "list_tasks"),
    ("/dashboard/populations", "Populations", "list_populations"),
    ("/dashboard/devices", "Devices", "list_devices"),
    ("/dashboard/tasks", "Tasks", "list_tasks"),
    ("/dashboard/models", "Models", "list_models"),
    ("/dashboard/rollouts", "Rollouts", "list_rollouts"),
    ("/dashboard/audit", "Audit log", "list_audit"),
)
"""Path, label, and the API's route without which the page is not shown."""
TONES = {
    "running": "busy", "soaking": "busy", "evaluating": "busy", "candidate": "busy", "in rounds": "busy",
    "completed": "good", "committed": "good", "promoted": "good", "active": "good", "passed": "good",
    "failed": "bad", "revoked": "bad", "rejected": "bad", "rolled_back": "bad", "not passed": "bad",
    "proposed": "warn", "paused": "warn", "set-aside": "warn", "waiting": "warn",
}  # fmt: skip
"""How states are coloured; their names stand beside the colour."""
MADE: Mapping[str, Callable[[], bytes]] = {
    "insight.js": cache(lambda: script().encode()),
    "insight.css": cache(lambda: "\n".join(styles()).encode()),
}
"""Files beside those in static/, which are put together of those of `archipel insight`."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SPANS = ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min"), (1, "s"))


def render(template: str, desk: Desk | None, /, **values: Any) -> str:
    """The HTML of a template; with a desk it has the navigation of that person."""
    shown = [] if desk is None else [(path, label) for path, label, route in NAVIGATION if desk.may(route)]
    return _environment().get_template(template).render(
        desk=desk, navigation=shown, program_version=__version__, now=None if desk is None else desk.now, **values
    )  # fmt: skip


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters.update(
        number=write_number, size=write_size, span=write_span, when=write_time, short=shorten, tone=find_tone,
        day=write_day, words=write_words, marked=mark_commands, advice=advise_on_failure, remedy=advise_on_reason,
    )  # fmt: skip
    made.globals["static"] = static_address
    return made


@cache
def static_address(name: str) -> str:
    """The address of a file in static/, which changes with its content, so that browsers may keep it for ever."""
    content = MADE[name]() if name in MADE else (STATIC / name).read_bytes()
    return f"/dashboard/static/{name}?v={hashlib.sha256(content).hexdigest()[:12]}"


def write_number(value: float | int | None) -> str:
    """With thin spaces between thousands, and four significant digits of what is no whole number."""
    if value is None:
        return "–"
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.4g}"


def write_size(value: float | None) -> str:
    """Bytes in a unit that fits."""
    if value is None:
        return "–"
    step = min(int(math.log(value, 1024)), len(_UNITS) - 1) if value >= 1 else 0
    return f"{value / 1024**step:.{0 if step == 0 else 1}f} {_UNITS[step]}"


def write_span(seconds: float | None) -> str:
    """A duration in its largest unit, such as `3 min`."""
    if seconds is None:
        return "–"
    for size, unit in _SPANS:
        if abs(seconds) >= 2 * size or (size <= 60 and abs(seconds) >= size):
            return f"{round(seconds / size)} {unit}"
    return f"{seconds * 1000:.0f} ms" if seconds else "0 s"


def write_day(at: float | None) -> str:
    """Date and time in UTC."""
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@jinja2.pass_context
def write_time(context: jinja2.runtime.Context, at: float | None) -> Markup:
    """How long ago a time is, or how far in the future, with the time itself; static/app.js makes it a local one."""
    if at is None:
        return Markup("–")
    now = context["now"]
    apart = "" if now is None else f"{write_span(abs(now - at))} ago" if at <= now else f"in {write_span(at - now)}"
    full = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(full, write_day(at), apart or write_day(at))


def shorten(value: str | None, length: int = 8) -> Markup:
    """The beginning of an id or digest; the whole of it is in the title."""
    if not value:
        return Markup("–")
    return Markup('<code title="{}">{}</code>').format(value, value[:length])


def find_tone(state: str) -> str:
    """The colour of a state, by name."""
    return TONES.get(state, "busy" if state in ("assigning", "aggregating") else "quiet")


def write_words(settings: Mapping[str, Any]) -> str:
    """A mapping in one line, without what is empty."""
    parts = [f"{name} {write_value(each)}" for name, each in settings.items() if each not in (None, "", [], (), {})]
    return ", ".join(parts) or "–"


def write_value(value: Any) -> str:
    """A setting for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return write_number(value)
    if isinstance(value, Mapping):
        return f"({write_words(value)})"
    return ", ".join(str(each) for each in value) if isinstance(value, list | tuple) else str(value)


def mark_commands(text: str) -> Markup:
    """A text whose commands stand between backticks."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(part) if number % 2 else part
                           for number, part in enumerate(parts))  # fmt: skip
