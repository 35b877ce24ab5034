"""The lines of the server's log that are about a round, for admins: they may name devices that the API shows nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from archipel.protocol.operator.progress import RoundLog
from archipel.server.database.tables import Round
from archipel.server.http.problems import refuse
from archipel.server.http.routes import ADMIN, Call, Route

MOST_BYTES = 4 << 20
"""So much of the end of server.log is read."""
MOST_LINES = 500
LONGEST = 4096
"""Characters of a line that are shown."""
_TRACEBACK = "    "


def read_round_log(call: Call[None], round_id: str) -> RoundLog:
    """Lines of this server's log about a round, oldest first: the newest 500, as far as they are kept."""
    with call.services.database.read() as session:
        if session.get(Round, round_id) is None:
            raise refuse(404, f"no round {round_id}")
    path = call.services.settings.process_log
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MOST_BYTES))
            data = file.read(MOST_BYTES)
    except OSError:
        # Where another program collects what the processes write there is no such file.
        return RoundLog(lines=[])
    found = list(_about(data.decode("utf-8", "replace").split("\n"), round_id))
    return RoundLog(lines=[line[:LONGEST] for line in found[-MOST_LINES:]])


def _about(lines: Iterable[str], round_id: str) -> Iterator[str]:
    """Lines with the id, and the lines of a traceback that follow one."""
    follows = False
    for line in lines:
        follows = round_id in line or (follows and line.startswith(_TRACEBACK))
        if follows:
            yield line


ROUTES = (Route("GET", "/v1/rounds/<id:round_id>/log", ADMIN, read_round_log, response=RoundLog),)
