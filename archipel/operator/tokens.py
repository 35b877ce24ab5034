"""Access tokens of people and scripts."""

from __future__ import annotations

from collections.abc import Iterator

from archipel.operator.connection import Resource, make_path
from archipel.protocol.operator.access import NewToken, TokenInfo, TokenPage, TokenRequest


class Tokens(Resource):
    """`OperatorClient.tokens`. Every call needs the role admin."""

    def create(self, request: TokenRequest) -> NewToken:
        """Make an access token. The request is sent only once: without an answer, list the tokens and revoke a new one.

        Route: POST /v1/tokens

        Args:
            request: the token's owner, role and populations; it is valid for `seconds`.

        Returns:
            The token, which is shown nowhere else and never again, and what it is for.

        Raises:
            RefusedError: 403: the token of this client lacks the role admin. 422: an admin's token cannot be bound to
                populations.
        """
        return self._connection.post_once("/v1/tokens", NewToken, request)

    def list(self, *, starts: str | None = None) -> Iterator[TokenInfo]:
        """Go through all access tokens: what they are for, never the tokens themselves.

        Route: GET /v1/tokens

        Args:
            starts: only those whose id begins with these hexadecimal digits; None: all.

        Returns:
            What the tokens are for, newest first, fetched as they are reached.

        Raises:
            RefusedError: 403: the token of this client lacks the role admin; at the first item.
        """
        return self._connection.pages("/v1/tokens", TokenPage, starts=starts)

    def revoke(self, token_id: str) -> TokenInfo:
        """End an access token now. A token that was revoked stays as it is.

        Route: POST /v1/tokens/<token_id>/revoke

        Args:
            token_id: the token's id, 32 hexadecimal digits (`TokenInfo.token_id`).

        Returns:
            The token, now revoked.

        Raises:
            RefusedError: 403: the token of this client lacks the role admin. 404: there is no such token.
        """
        return self._connection.post(make_path("tokens", token_id, "revoke"), TokenInfo)
