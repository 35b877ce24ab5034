"""The server itself: whether it works, who it is, and what its API is."""

from __future__ import annotations

from typing import Any

from archipel.operator.connection import Resource
from archipel.protocol.operator.tasks import Health, ServerInfo


class Server(Resource):
    """`OperatorClient.server`. These calls need no role."""

    def health(self) -> Health:
        """Ask whether the server can use its database and its storage.

        Route: GET /v1/health

        Returns:
            The status "ok" and the version of archipel that the server runs.

        Raises:
            RefusedError: 503: it cannot; the text says why.
        """
        return self._connection.get("/v1/health", Health)

    def info(self) -> ServerInfo:
        """Ask who the server is.

        Route: GET /v1/server

        Returns:
            Its public key, the key that certifies enrolment tokens (32 bytes each), and its version.

        Raises:
            RefusedError: no status that other calls do not have.
        """
        return self._connection.get("/v1/server", ServerInfo)

    def description(self) -> dict[str, Any]:
        """Fetch the description of the whole API.

        Route: GET /v1/openapi.json

        Returns:
            The OpenAPI 3.1 document, as JSON values.

        Raises:
            RefusedError: no status that other calls do not have.
        """
        return self._connection.get("/v1/openapi.json", dict[str, Any])
