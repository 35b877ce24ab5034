"""Forms as data: their fields, and how texts of a browser become the API's values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from archipel.errors import InvalidRequestError
from archipel.protocol.mistakes import tell

Kind = Literal["text", "whole", "real", "choice", "pairs", "stages", "json"]
_STAGE = re.compile(r"([0-9.]+)\s*%?\s*(?:for\s+)?([0-9.]+)\s*(s|min|h|d)?")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


@dataclass(frozen=True)
class Field:
    """One field. `value` stands in it first; `options` are the values of a choice, or what a text suggests.

    `pairs` are such as `accuracy 1, loss 10`; `stages` one stage in a line, such as `10 % for 2 h`; `json` an object.
    """

    name: str
    label: str
    kind: Kind = "text"
    value: str = ""
    hint: str = ""
    options: tuple[str, ...] = ()
    required: bool = False


def read_form(fields: Sequence[Field], form: Mapping[str, str]) -> dict[str, Any]:
    """The fields' values as builtins for the API; fields that are empty are left out.

    Raises InvalidRequestError with the labels of all fields that are wrong.
    """
    found: dict[str, Any] = {}
    mistakes: list[str] = []
    for field in fields:
        text = form.get(field.name, "").strip()
        if not text:
            if field.required:
                mistakes.append(f"{field.label}: is missing")
            continue
        try:
            found[field.name] = _read(field, text)
        except (ValueError, msgspec.DecodeError):
            mistakes.append(f"{field.label}: {_EXPECTED[field.kind]}, got {text[:100]!r}")
    if mistakes:
        raise InvalidRequestError(tell(mistakes))
    return found


_EXPECTED = {
    "text": "expected a text",
    "whole": "expected a whole number",
    "real": "expected a number",
    "choice": "expected one of the choices",
    "pairs": "expected such as 'accuracy 1, loss 10'",
    "stages": "expected a stage in each line, such as '10 % for 2 h'",
    "json": "expected a JSON object",
}


def _read(field: Field, text: str) -> Any:
    if field.kind == "whole":
        return int(text)
    if field.kind == "real":
        return float(text)
    if field.kind == "pairs":
        parts = [part.replace("=", " ").replace(":", " ").rsplit(None, 1) for part in text.split(",") if part.strip()]
        return {name.strip(): float(value) for name, value in parts}
    if field.kind == "stages":
        return [_read_stage(line) for line in text.splitlines() if line.strip()]
    if field.kind == "json":
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    if field.kind == "choice" and text not in field.options:
        raise ValueError(text)
    return text


def _read_stage(line: str) -> dict[str, float]:
    match = _STAGE.fullmatch(line.strip())
    if match is None:
        raise ValueError(line)
    return {"percent": float(match[1]), "soak_seconds": float(match[2]) * _UNITS[match[3]]}
