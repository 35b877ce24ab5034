"""Rounds of tasks, one by one; `OperatorClient.tasks.rounds` goes through those of a task."""

from __future__ import annotations

from archipel.operator.connection import Resource, make_path
from archipel.protocol.messages import RoundStatus
from archipel.protocol.operator.progress import RoundLog
from archipel.protocol.operator.tasks import RoundInfo


class Rounds(Resource):
    """`OperatorClient.rounds`. `round_id` is a round's id, 32 hexadecimal digits (`RoundInfo.round_id`)."""

    def get(self, round_id: str) -> RoundInfo:
        """Look at one round, with how far each participant came.

        Route: GET /v1/rounds/<round_id>/participants

        Args:
            round_id: the round's id.

        Returns:
            The round as it is now.

        Raises:
            RefusedError: 404: there is no such round for this token.
        """
        return self._connection.get(make_path("rounds", round_id, "participants"), RoundInfo)

    def status(self, round_id: str) -> RoundStatus:
        """Ask for a round's phase only, which costs the server little.

        Route: GET /v1/rounds/<round_id>

        Args:
            round_id: the round's id.

        Returns:
            The phase, when it ends (Unix seconds), and after how many seconds to ask again.

        Raises:
            RefusedError: 404: there is no such round for this token.
        """
        return self._connection.get(make_path("rounds", round_id), RoundStatus)

    def log(self, round_id: str) -> RoundLog:
        """Read what the server's log says about a round, which only admins may.

        Route: GET /v1/rounds/<round_id>/log

        Args:
            round_id: the round's id.

        Returns:
            The lines of this server's log, oldest first: the newest 500, as far as they are kept.

        Raises:
            RefusedError: 404: there is no such round; 403: the token is not an admin's.
        """
        return self._connection.get(make_path("rounds", round_id, "log"), RoundLog)
