"""Forms as data: their fields, and how texts of a browser become the API's values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from archipel.errors import InvalidRequestError
from archipel.protocol.mistakes import tell

Kind = Literal["text", "id", "whole", "real", "choice", "pairs", "stages", "json"]
_AT = re.compile(r"^(.*) - at `\$\.(\w+)[^`]*`$", re.S)
_BOUND = re.compile(r"Expected `(int|float)`(?: ([<>]=?) ([\d.e+-]+))?")
_NUMBERS = {"int": "whole number", "float": "number"}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}
_SHORTEST = 4
"""Characters of an id that stand for it, as on the command line."""
_STAGE = re.compile(r"([0-9.]+)\s*%?\s*(?:for\s+)?([0-9.]+)\s*(s|min|h|d)?")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


@dataclass(frozen=True)
class Field:
    """One field. `value` stands in it first; `options` are the values of a choice, or what a text suggests, and `names`
    what people call these.

    `pairs` are such as `accuracy 1, loss 10`; `stages` one stage in a line, such as `10 % for 2 h`; `json` an object;
    `id` an id or digest, for which the first characters will do where one option alone begins so. `expects` says what
    a value has to be like, where the API would name a regular expression.
    """

    name: str
    label: str
    kind: Kind = "text"
    value: str = ""
    hint: str = ""
    options: tuple[str, ...] = ()
    required: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    expects: str = ""


def spell_refusal(fields: Sequence[Field], form: Mapping[str, str], message: str) -> str:
    """What a decoder says of a request, with the label of the field of the form and what was typed there."""
    match = _AT.match(message)
    found = next((each for each in fields if match is not None and each.name == match[2]), None)
    if match is None or found is None:
        return message
    typed = form.get(found.name, "").strip()
    return f"{found.label}: {found.expects or _spell(match[1])}{f', got {typed[:100]!r}' if typed else ''}"


def _spell(expectation: str) -> str:
    """What a number has to be, in words instead of a programmer's signs."""
    match = _BOUND.match(expectation)
    if match is None:
        return expectation
    kind, sign, bound = match.groups()
    return f"expected a {_NUMBERS[kind]}" + (f" {_BOUNDS[sign]} {bound}" if sign else "")


def read_form(fields: Sequence[Field], form: Mapping[str, str]) -> dict[str, Any]:
    """The fields' values as builtins for the API; fields that are empty are left out.

    Raises InvalidRequestError with the labels of all fields that are wrong.
    """
    found: dict[str, Any] = {}
    mistakes: list[str] = []
    for each in fields:
        text = form.get(each.name, "").strip()
        if not text:
            if each.required:
                mistakes.append(f"{each.label}: is missing")
            continue
        try:
            found[each.name] = _read(each, text)
        except (ValueError, msgspec.DecodeError):
            mistakes.append(f"{each.label}: {_EXPECTED[each.kind]}, got {text[:100]!r}")
    if mistakes:
        raise InvalidRequestError(tell(mistakes))
    return found


_EXPECTED = {
    "text": "expected a text",
    "id": "expected an id",
    "whole": "expected a whole number",
    "real": "expected a number",
    "choice": "expected one of the choices",
    "pairs": "expected such as 'accuracy 1, loss 10'",
    "stages": "expected a stage in each line, such as '10 % for 2 h'",
    "json": "expected a JSON object",
}


def _read(asked: Field, text: str) -> Any:
    if asked.kind == "id":
        begun = [option for option in asked.options if option.startswith(text)]
        return begun[0] if len(begun) == 1 and len(text) >= _SHORTEST else text
    if asked.kind == "whole":
        return int(text)
    if asked.kind == "real":
        return float(text)
    if asked.kind == "pairs":
        parts = [part.replace("=", " ").replace(":", " ").rsplit(None, 1) for part in text.split(",") if part.strip()]
        return {name.strip(): float(value) for name, value in parts}
    if asked.kind == "stages":
        return [_read_stage(line) for line in text.splitlines() if line.strip()]
    if asked.kind == "json":
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    if asked.kind == "choice" and text not in asked.options:
        raise ValueError(text)
    return text


def _read_stage(line: str) -> dict[str, float]:
    match = _STAGE.fullmatch(line.strip())
    if match is None:
        raise ValueError(line)
    return {"percent": float(match[1]), "soak_seconds": float(match[2]) * _UNITS[match[3]]}
