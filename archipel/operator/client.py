"""OperatorClient: the API of one server, with one attribute for each kind of resource."""

from __future__ import annotations

import ssl

from archipel.operator.audit import Audit
from archipel.operator.bundles import Bundles
from archipel.operator.connection import Connection, OnOutage
from archipel.operator.devices import Devices
from archipel.operator.enrolment_tokens import EnrolmentTokens
from archipel.operator.former_names import FormerNames, keep_former_names
from archipel.operator.models import Models
from archipel.operator.populations import Populations
from archipel.operator.rollouts import Rollouts
from archipel.operator.rounds import Rounds
from archipel.operator.server import Server
from archipel.operator.tasks import Tasks
from archipel.operator.tokens import Tokens
from archipel.operator.weights import Weights
from archipel.operator.weights_log import WeightsLogs


class OperatorClient(FormerNames):
    """Calls one server with an access token of an operator, an analyst, an auditor or an admin.

    Args:
        server: its address, such as "https://federation.example:8443".
        token: an access token.
        timeout: seconds that connecting, and each part of an answer, may take.
        tls: for https://, see archipel.protocol.tls.client_context; None: with the system's authorities.
        on_outage: `tasks.wait` and `rollouts.wait` keep waiting while the server cannot be reached. They call this with
            the error when an outage begins, and with None when it ends. It may be replaced later.
        allow_http: allow plain http:// to another machine, where others may read the token.

    Every call is one HTTP request; a list asks for the next 100 items when they are reached. Where the server does not
    answer or is busy (429, 503), the client repeats a request up to three times, except for `bundles.upload`, which the
    caller may repeat, and `tokens.create`.

    Raises:
        ClientError: here, the address or the token is malformed. From any call, an id or a name is malformed, or the
            answer is not an archipel server's.
        UnreachableError: from any call, there was no answer.
        RefusedError: from any call, the server answered with an error, whose HTTP status is `status`. 401: it does not
            know the token, or the token has expired or was revoked. 403: the token's role does not allow the call. 422,
            and 400: the request is not possible; the text says why. 429 and 503: call again after `retry_after`
            seconds. The methods list their other statuses.

    Example:
        with OperatorClient("https://federation.example", token) as client:
            bundle = client.bundles.upload("digits.bundle", "pupils")
            request = TaskRequest(
                name="digits", population="pupils", bundle=bundle.digest, rounds=10, min_cohort=15, cohort=16
            )
            task = client.tasks.create(request)
            done = client.tasks.wait(task.task_id, timeout=3600)
            weights = client.weights.read(done.model)
    """

    def __init__(
        self,
        server: str,
        token: str,
        *,
        timeout: float = 30.0,
        tls: ssl.SSLContext | None = None,
        on_outage: OnOutage | None = None,
        allow_http: bool = False,
    ) -> None:
        self._connection = Connection(
            server, token, timeout=timeout, tls=tls, on_outage=on_outage, allow_http=allow_http
        )
        self.server = Server(self._connection)
        self.bundles = Bundles(self._connection)
        self.tasks = Tasks(self._connection)
        self.rounds = Rounds(self._connection)
        self.weights = Weights(self._connection)
        self.weights_log = WeightsLogs(self._connection)
        self.models = Models(self._connection)
        self.rollouts = Rollouts(self._connection)
        self.devices = Devices(self._connection)
        self.populations = Populations(self._connection)
        self.enrolment_tokens = EnrolmentTokens(self._connection)
        self.tokens = Tokens(self._connection)
        self.audit = Audit(self._connection)
        keep_former_names(self)

    @property
    def on_outage(self) -> OnOutage | None:
        """The function that `tasks.wait` and `rollouts.wait` call when an outage begins, and when it ends."""
        return self._connection.on_outage

    @on_outage.setter
    def on_outage(self, call: OnOutage | None) -> None:
        self._connection.on_outage = call

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the server. A call after that opens new ones."""
        self._connection.close()
