"""Which fields of a request an error is about: the `errors` of the error shape."""

from __future__ import annotations

import re

import msgspec

from archipel.protocol.messages import FieldProblem
from archipel.protocol.mistakes import split
from archipel.protocol.written import pointer

_PLACE = re.compile(r"(?:^|: )((\w+)(?:\.\w+|\[\d+\])*)(?=: (.+))", re.S)
"""How errors name a field, at the beginning or after what they are about: `cohort: ...`, `stages[0].percent: ...`."""
_SEVERAL = re.compile(r"(?<!\d)\d+ mistakes\n  ")
_STEP = re.compile(r"\w+")


def undecoded(error: Exception) -> list[FieldProblem]:
    """The field that kept a body from being decoded; none where the body is no JSON at all."""
    if not isinstance(error, msgspec.ValidationError):
        return []
    return [FieldProblem(pointer=pointer(error), detail=str(error))]


def unread(error: msgspec.ValidationError) -> list[FieldProblem]:
    """The parameter that kept a query string from being read."""
    name = pointer(error).removeprefix("#/")
    return [FieldProblem(parameter=name, detail=str(error))] if name else []


def named(message: str, kind: type[msgspec.Struct] | None) -> list[FieldProblem]:
    """The fields of a body of this kind that `message` names, one of each mistake that it tells."""
    fields = () if kind is None else kind.__struct_fields__
    found = []
    # What comes before several mistakes says what they are about.
    for text in split(message[several.start() :]) if (several := _SEVERAL.search(message)) else [message]:
        match = next((match for match in _PLACE.finditer(text) if match[2] in fields), None)
        if match is not None:
            found.append(FieldProblem(pointer="#/" + "/".join(_STEP.findall(match[1])), detail=match[3]))
    return found
