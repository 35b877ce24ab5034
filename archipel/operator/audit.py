"""The audit log: who changed what and when, in entries that each have the hash of the one before."""

from __future__ import annotations

from collections.abc import Iterator

from archipel.operator.connection import Resource
from archipel.protocol.operator.access import AuditEntry, AuditPage
from archipel.protocol.sealed import Sealed


class Audit(Resource):
    """`OperatorClient.audit`. Every call needs the role auditor or admin, and a token for all populations."""

    def list(self, *, after: int = 0) -> Iterator[AuditEntry]:
        """Go through the audit log.

        Route: GET /v1/audit

        Args:
            after: the number of the entry after which to begin; 0: from the first on.

        Returns:
            The entries, oldest first, fetched as they are reached; `time` is in microseconds since 1970.

        Raises:
            RefusedError: 403: the token lacks the role auditor, or is for some populations only; at the first item.
        """
        return self._connection.pages("/v1/audit", AuditPage, after=after)

    def head(self) -> Sealed:
        """Fetch the number and the hash of the newest entry. Whoever keeps them notices when the log is rewritten.

        Route: GET /v1/audit/head

        Returns:
            An `AuditHead` that the server key signed (label "audit").

        Raises:
            RefusedError: 403: the token lacks the role auditor, or is for some populations only.
        """
        return self._connection.get("/v1/audit/head", Sealed)
