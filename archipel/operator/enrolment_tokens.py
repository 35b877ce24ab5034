"""Enrolment tokens: they are made offline (`archipel token`), and the server refuses those that are revoked here."""

from __future__ import annotations

from collections.abc import Iterator

from archipel.operator.connection import Resource
from archipel.protocol.operator.devices import RevokedTokenInfo, RevokedTokenPage, TokenRevocation
from archipel.protocol.sealed import Sealed


class EnrolmentTokens(Resource):
    """`OperatorClient.enrolment_tokens`. The server knows a token only after it was used or revoked."""

    def revoke(self, *, certificate: Sealed | None = None, token_key: bytes | None = None) -> RevokedTokenInfo:
        """Let nobody enrol with a token any more. A revoked token stays as it is.

        Route: POST /v1/enrolment-tokens/revoke

        Args:
            certificate: the token's certificate (`EnrolmentToken.certificate`); either this or the key is given.
            token_key: the token's public key, 32 bytes, for a token whose certificate is missing.

        Returns:
            What the server remembers of it.

        Raises:
            RefusedError: 403: the token of this client lacks the role operator, or is not for the population; only
                one for all populations may give the key alone. 409: a device enrolled with it: revoke the device. 422:
                both or none were given, or this server's enrolment key did not sign the certificate.
        """
        body = TokenRevocation(certificate=certificate, token_key=token_key)
        return self._connection.post("/v1/enrolment-tokens/revoke", RevokedTokenInfo, body)

    def revoked(self) -> Iterator[RevokedTokenInfo]:
        """Go through the enrolment tokens that are refused.

        Route: GET /v1/enrolment-tokens/revoked

        Returns:
            The tokens, the one revoked last first, fetched as they are reached.

        Raises:
            RefusedError: no status that other calls do not have; at the first item.
        """
        return self._connection.pages("/v1/enrolment-tokens/revoked", RevokedTokenPage)
