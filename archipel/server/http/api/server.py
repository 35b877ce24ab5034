"""The health check, and the server's keys and version."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from archipel import __version__
from archipel.errors import ServerError
from archipel.protocol.operator.tasks import Health, ServerInfo
from archipel.server.http.problems import refuse
from archipel.server.http.routes import PUBLIC, Call, Route


def health(call: Call[None]) -> Health:
    """Whether database and blob store can be used."""
    try:
        with call.services.database.read() as session:
            session.execute(text("SELECT 1"))
        call.services.blobs.check()
    except (SQLAlchemyError, ServerError) as error:
        raise refuse(503, f"the server cannot work: {_say(error)}") from None
    return Health(status="ok", version=__version__)


def _say(error: Exception) -> str:
    # Strangers read it: a driver's words have addresses and names of users in them.
    return "the database cannot be used" if isinstance(error, SQLAlchemyError) else str(error).splitlines()[0]


def server_info(call: Call[None]) -> ServerInfo:
    """The server's public keys and version."""
    settings = call.services.settings
    return ServerInfo(server_key=settings.public_key, enrolment_key=settings.enrolment_public_key, version=__version__)


ROUTES = (
    Route("GET", "/v1/health", PUBLIC, health, response=Health),
    Route("GET", "/v1/server", PUBLIC, server_info, response=ServerInfo),
)
