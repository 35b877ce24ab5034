"""The API's own description, for tools and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from archipel import __version__
from archipel.server.http.openapi import document
from archipel.server.http.routes import PUBLIC, Call, Route


def routes(resources: Mapping[str, Sequence[Route]]) -> tuple[Route, ...]:
    """The route of the document of `resources` and of itself."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document({**resources, "description": made}, version=__version__))

    def show_description(call: Call[None]) -> bytes:
        """This document: OpenAPI 3.1."""
        return encoded()

    made = (Route("GET", "/v1/openapi.json", PUBLIC, show_description, response=dict[str, Any]),)
    return made
