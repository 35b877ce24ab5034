"""The weights log, for people who audit the server: it says where the weights come from that devices get."""

from __future__ import annotations

from collections.abc import Iterator

from archipel.operator.connection import Resource, make_path
from archipel.protocol.messages import Endorsement, WeightsLog
from archipel.protocol.sealed import Sealed


class WeightsLogs(Resource):
    """`OperatorClient.weights_log`. There is one log for each bundle and population.

    The server signs every entry, and the devices of a secure round sign the evidence for its entry.
    archipel.protocol.provenance checks both.
    """

    def list(self, name: str, digest: str, *, after: int = 0) -> Iterator[Sealed]:
        """Go through the entries of a log.

        Route: GET /v1/populations/<name>/weights-log/<digest>

        Args:
            name: the population's name.
            digest: the bundle's digest, 64 hexadecimal digits.
            after: the number of the entry after which to begin; 0: from the first on.

        Returns:
            The entries, oldest first, fetched as they are reached: each a `WeightsStatement` that the server key signed
            (label "weights"). None where nothing was trained from the bundle.

        Raises:
            RefusedError: 403: the token is not for this population; at the first item.
        """
        while True:
            log = self._connection.get(make_path("populations", name, "weights-log", digest), WeightsLog, after=after)
            yield from log.entries
            after += len(log.entries)  # their numbers have no gaps
            if not log.entries or after >= log.newest:
                return

    def endorsement(self, name: str, digest: str, number: int) -> Endorsement:
        """Fetch the evidence for one entry, which the devices of a secure round have signed.

        Route: GET /v1/populations/<name>/weights-log/<digest>/<number>/endorsement

        Args:
            name: the population's name.
            digest: the bundle's digest, 64 hexadecimal digits.
            number: the entry's number, from 1 on.

        Returns:
            The round's plan, its survivors, and their signatures.

        Raises:
            RefusedError: 403: the token is not for this population. 404: there is no such entry, or no secure round
                made it.
        """
        return self._connection.get(
            make_path("populations", name, "weights-log", digest, number, "endorsement"), Endorsement
        )
