"""The way in for every request: who asks, whether it may, and whether it comes too often."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from flask import Response, request

from archipel.errors import ApiError, RefusalError
from archipel.server.callers import ANYONE, Identity, Role
from archipel.server.http.auth import Authenticator
from archipel.server.http.problems import api_error, refuse
from archipel.server.http.request_limits import RequestLimits, address_source
from archipel.server.services import Services


@dataclass(frozen=True)
class Admission:
    """A request that may go on. `source` is what it is counted under; `leave` is called when it has been served."""

    identity: Identity
    source: str
    leave: Callable[[], None]


@dataclass(frozen=True)
class Door:
    """One for each web process."""

    services: Services
    authenticator: Authenticator
    limits: RequestLimits

    def admit(self, roles: frozenset[Role]) -> Admission:
        """Who makes the present request. Nothing of its body has been read then.

        Raises ApiError 401, 403 or 429 where it may not go on.
        """
        self.services.tally.flush(self.services.database, self.services.clock())
        source = address_source(request.remote_addr)
        try:
            identity = ANYONE if "anyone" in roles else self._identify(source)
            known = identity.role != "anyone"
            source = identity.actor if known else source
            request.environ["archipel.device"] = identity.device_id or None
            self.limits.count(source, known=known)
            if identity.role not in roles:
                if not known:
                    raise refuse(401, "this needs a token: 'Authorization: Bearer TOKEN'")
                raise refuse(403, f"this is not for the role {identity.role!r}")
            return Admission(identity, source, self.limits.enter(source))
        except ApiError as error:
            self.note(error, source)
            raise

    def note(self, error: RefusalError, source: str) -> None:
        """Count an answer that says no, for the audit log. That a request came without any token is nothing of note."""
        now = self.services.clock()
        status = api_error(error).status
        if status == 429:
            self.services.tally.count("limit.hit", source, now)
        elif status == 403 or (status == 401 and "Authorization" in request.headers):
            self.services.tally.count("access.refused", source, now)

    def _identify(self, source: str) -> Identity:
        try:
            return self.authenticator.identify(request.headers.get("Authorization"))
        except ApiError:
            # So that guessing is no faster than asking without a token.
            self.limits.count(source, known=False)
            raise


def at_the_end(response: Response, leave: Callable[[], None]) -> None:
    """Call `leave` when the response has been sent: a reader that takes its time keeps a thread busy until then."""
    response.call_on_close(leave)
    # A file is sent without the response, which is gone by then; what it is read from is not.
    weakref.finalize(response.response if response.direct_passthrough else response, leave)
