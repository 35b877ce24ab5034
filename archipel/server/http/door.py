"""Admits requests: identifies the caller, and checks its role and the request limits."""

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
    """An admitted request. It is counted under `source`; `leave` must be called when it has been served."""

    identity: Identity
    source: str
    leave: Callable[[], None]


@dataclass(frozen=True)
class Door:
    """Admits the requests of one web process."""

    services: Services
    authenticator: Authenticator
    limits: RequestLimits

    def admit(
        self, roles: frozenset[Role], *, download: bool = False, identify: Callable[[], Identity] | None = None
    ) -> Admission:
        """Admit the current request, before anything of its body is read.

        With `download` it asks for a file that anyone gets, which has limits of its own. `identify` finds out who calls
        (None: by the header with a bearer token), and raises ApiError 401 for nobody. Raises ApiError 401, 403, 429 or
        503 if it is refused.
        """
        self.services.tally.flush(self.services.database, self.services.clock())
        source = address_source(request.remote_addr)
        try:
            if download:
                return Admission(ANYONE, source, self.limits.begin_download(source))
            identity = ANYONE if "anyone" in roles else self._identify(source, identify)
            known = identity.role != "anyone"
            source = identity.actor if known else source
            request.environ["archipel.device"] = identity.device_id or None
            # Counted before the role is checked: refused requests use up the limit too.
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
        """Count a refused request for the audit log. A request without any token is not worth an entry."""
        now = self.services.clock()
        status = api_error(error).status
        if status == 429:
            self.services.tally.count("limit.hit", source, now)
        elif status == 403 or (status == 401 and "Authorization" in request.headers):
            self.services.tally.count("access.refused", source, now)

    def _identify(self, source: str, identify: Callable[[], Identity] | None) -> Identity:
        try:
            if identify is not None:
                return identify()
            return self.authenticator.identify(request.headers.get("Authorization"))
        except ApiError:
            # A wrong token counts under the address, so that guessing tokens is limited like anonymous requests.
            self.limits.count(source, known=False)
            raise


def at_the_end(response: Response, leave: Callable[[], None]) -> None:
    """Call `leave` when the response has been sent, because a slow reader keeps a thread busy until then."""
    response.call_on_close(leave)
    # gunicorn sends a file without the Response object, which may be gone before the file is sent. The object that the
    # file is read from lives as long as the sending, so `leave` is tied to that.
    weakref.finalize(response.response if response.direct_passthrough else response, leave)
