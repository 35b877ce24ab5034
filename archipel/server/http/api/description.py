"""The API's own description, for tools and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from flask import Response

from archipel import __version__
from archipel.server.http.openapi import document
from archipel.server.http.routes import PUBLIC, Call, Route
from archipel.server.http.sending import in_time, parts_of


def routes(resources: Mapping[str, Sequence[Route]]) -> tuple[Route, ...]:
    """The route of the document of `resources` and of itself."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document({**resources, "description": made}, version=__version__))

    def show_description(call: Call[None]) -> Response:
        """This document: OpenAPI 3.1."""
        data = encoded()
        response = Response(in_time(parts_of(data), call.services.settings.stall_seconds), mimetype="application/json")
        response.content_length = len(data)
        return response

    # The one answer of the API that strangers get and that does not fit into what the kernel keeps for a slow reader.
    made = (Route("GET", "/v1/openapi.json", PUBLIC, show_description, response=dict[str, Any], download=True),)
    return made
