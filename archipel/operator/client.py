"""The operator's client: typed calls over HTTP."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
import numpy as np
import urllib3

from archipel.bundle import read_weights
from archipel.errors import ClientError, RefusedError
from archipel.operator.answers import refused, unreachable
from archipel.operator.registry_calls import RegistryCalls, wait_until_ended
from archipel.protocol.address import check_url
from archipel.protocol.messages import RoundStatus
from archipel.protocol.operator.devices import (
    DeviceInfo,
    DevicePage,
    PopulationInfo,
    PopulationPage,
    RevokedTokenInfo,
    RevokedTokenPage,
    TokenRevocation,
)
from archipel.protocol.operator.tasks import (
    AuditEntry,
    AuditPage,
    BundleInfo,
    Health,
    NewToken,
    RoundInfo,
    RoundPage,
    ServerInfo,
    TaskInfo,
    TaskPage,
    TaskRequest,
    TokenInfo,
    TokenPage,
    TokenRequest,
)
from archipel.protocol.sealed import Sealed

T = TypeVar("T")
PAGE = 100
SEGMENT = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
"""Of a path: ids and names are nothing else, so what stands for one in an address cannot lead elsewhere."""
ACCESS_TOKEN = re.compile("[!-~]{1,256}")
"""Printable ASCII without blanks: anything else is some other file's content."""


class OperatorClient(RegistryCalls):
    """Calls one server with the operator's token. Raises UnreachableError, or RefusedError for an error status.

    `server` is such as "http://127.0.0.1:8470". Everything is retried that may be sent twice, which is all but
    `upload_bundle` (which may be repeated) and `create_token`. `tls` is for https://, see
    archipel.protocol.tls.client_context; None: with the system's authorities. `allow_http`: plain http:// also to
    another machine. While the server is not to be reached, `wait_task` and `wait_rollout` go on: `on_outage` is called
    with the error when that begins, with None when it ends.
    """

    def __init__(
        self,
        server: str,
        token: str,
        *,
        timeout: float = 30.0,
        tls: ssl.SSLContext | None = None,
        on_outage: Callable[[ClientError | None], None] | None = None,
        allow_http: bool = False,
    ) -> None:
        check_url(server, allow_http=allow_http)
        if not ACCESS_TOKEN.fullmatch(token):
            raise ClientError("access token: expected at most 256 printable ASCII characters without blanks")
        self.on_outage = on_outage
        self._server = server.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(timeout=timeout, ssl_context=tls)

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.clear()

    def health(self) -> Health:
        return self._call("GET", "/v1/health", Health)

    def server(self) -> ServerInfo:
        return self._call("GET", "/v1/server", ServerInfo)

    def upload_bundle(self, path: Path | str, population: str | None = None) -> BundleInfo:
        """Send a .bundle file, which errors name, for `population` (None: all that the token is for).

        Raises ClientError when it cannot be read.
        """
        path = Path(path)
        url = "/v1/bundles" + ("" if population is None else f"?{urlencode({'population': population})}")
        try:
            with open(path, "rb") as file:
                headers = {"Content-Type": "application/zip", "Content-Length": str(path.stat().st_size)}
                return self._call("POST", url, BundleInfo, body=file, headers=headers)
        except OSError as error:
            raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
        except RefusedError as error:
            raise RefusedError(
                error.status, error.kind, f"{path}: {error.message}", error.retry_after, error.request_id
            ) from None

    def create_task(self, request: TaskRequest, *, key: str | None = None) -> TaskInfo:
        """Make a task. With the same `key` (16 to 64 letters, digits, - or _) the same task is made only once, however
        often this is called; without one, once for this call, however often it has to be sent."""
        return self._post("/v1/tasks", TaskInfo, request, key=key)

    def tasks(self) -> Iterator[TaskInfo]:
        """Every task, newest first."""
        return self._items("/v1/tasks", TaskPage)

    def task(self, task_id: str) -> TaskInfo:
        return self._call("GET", f"/v1/tasks/{task_id}", TaskInfo)

    def approve(self, task_id: str) -> TaskInfo:
        """Let a proposed query run; needs the role analyst, and somebody else's token than the one that asked."""
        return self._post(f"/v1/tasks/{task_id}/approve", TaskInfo)

    def cancel(self, task_id: str) -> TaskInfo:
        return self._post(f"/v1/tasks/{task_id}/cancel", TaskInfo)

    def pause(self, task_id: str) -> TaskInfo:
        """Open no further rounds; the one under way is finished."""
        return self._post(f"/v1/tasks/{task_id}/pause", TaskInfo)

    def resume(self, task_id: str) -> TaskInfo:
        return self._post(f"/v1/tasks/{task_id}/resume", TaskInfo)

    def rounds(self, task_id: str) -> list[RoundInfo]:
        """Every round of the task, failed ones too, oldest first."""
        return list(self._items(f"/v1/tasks/{task_id}/rounds", RoundPage))

    def round(self, round_id: str) -> RoundInfo:
        """One round, with how far each participant came."""
        return self._call("GET", f"/v1/rounds/{round_id}/participants", RoundInfo)

    def round_status(self, round_id: str) -> RoundStatus:
        return self._call("GET", f"/v1/rounds/{round_id}", RoundStatus)

    def create_token(self, request: TokenRequest) -> NewToken:
        """Make an access token; needs the role admin. The answer is the only place where it is ever shown."""
        headers = {"Content-Type": "application/json"}
        return self._call("POST", "/v1/tokens", NewToken, body=msgspec.json.encode(request), headers=headers)

    def tokens(self) -> Iterator[TokenInfo]:
        """What every access token is for, newest first."""
        return self._items("/v1/tokens", TokenPage)

    def revoke_token(self, token_id: str) -> TokenInfo:
        return self._post(f"/v1/tokens/{token_id}/revoke", TokenInfo)

    def populations(self) -> Iterator[PopulationInfo]:
        """Every population, by name."""
        return self._items("/v1/populations", PopulationPage)

    def population(self, name: str) -> PopulationInfo:
        return self._call("GET", f"/v1/populations/{name}", PopulationInfo)

    def devices(self, *, population: str | None = None, state: str | None = None) -> Iterator[DeviceInfo]:
        """Devices, newest first. `state`: "active", "set-aside" or "revoked"."""
        return self._items("/v1/devices", DevicePage, population=population, state=state)

    def device(self, device_id: str) -> DeviceInfo:
        return self._call("GET", f"/v1/devices/{device_id}", DeviceInfo)

    def revoke_device(self, device_id: str) -> DeviceInfo:
        """End a device's membership for good."""
        return self._post(f"/v1/devices/{device_id}/revoke", DeviceInfo)

    def release_device(self, device_id: str) -> DeviceInfo:
        """Let rounds take a device again that was set aside."""
        return self._post(f"/v1/devices/{device_id}/release", DeviceInfo)

    def revoke_enrolment_token(
        self, *, certificate: Sealed | None = None, token_key: bytes | None = None
    ) -> RevokedTokenInfo:
        """Let nobody enrol with a token any more; one that was used is refused. Give either of the two."""
        body = TokenRevocation(certificate=certificate, token_key=token_key)
        return self._post("/v1/enrolment-tokens/revoke", RevokedTokenInfo, body)

    def revoked_enrolment_tokens(self) -> Iterator[RevokedTokenInfo]:
        """Newest first."""
        return self._items("/v1/enrolment-tokens/revoked", RevokedTokenPage)

    def audit(self, *, after: int = 0) -> Iterator[AuditEntry]:
        """The audit log from the entry after number `after`, oldest first; needs the role auditor or admin."""
        return self._items("/v1/audit", AuditPage, after=str(after))

    def audit_head(self) -> Sealed:
        """An AuditHead, signed by the server (label "audit")."""
        return self._call("GET", "/v1/audit/head", Sealed)

    def blob(self, digest: str) -> bytes:
        """Weights of a version, as they are stored."""
        return self._request("GET", f"/v1/blobs/{digest}").data

    def bundle(self, digest: str) -> bytes:
        """The .bundle file."""
        return self._request("GET", f"/v1/bundles/{digest}").data

    def weights(self, digest: str) -> dict[str, np.ndarray]:
        """Parameters of a version by name, read-only."""
        return read_weights(self.blob(digest))

    def wait_task(
        self,
        task_id: str,
        *,
        timeout: float | None = None,
        poll: float = 0.5,
        on_change: Callable[[TaskInfo], None] | None = None,
    ) -> TaskInfo:
        """Wait until the task has ended, whichever way. `on_change` sees it whenever it has changed.

        `timeout` and `poll` are in seconds. Raises ClientError when the time is over, UnreachableError or RefusedError
        when the server was away all the time that was left, without a `timeout` for ten minutes.
        """
        return wait_until_ended(
            lambda: self.task(task_id),
            _news,
            lambda task: (
                f"task {task.name!r} is {task.state}: {task.rounds_committed} of {task.rounds} rounds, "
                + (task.waiting_for or f"{_few(task.waiting)} devices waiting, at least {task.min_cohort} needed")
            ),
            timeout=timeout,
            poll=poll,
            on_change=on_change,
            on_outage=self.on_outage,
        )

    def _items(self, path: str, kind: type[Any], **chosen: str | None) -> Iterator[Any]:
        query: dict[str, object] = {
            "limit": PAGE,
            **{name: value for name, value in chosen.items() if value is not None},
        }
        while True:
            page = self._call("GET", f"{path}?{urlencode(query)}", kind)
            yield from page.items
            if page.next is None:
                return
            query["after"] = page.next

    def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        repeat: bool = False,
    ) -> T:
        data = self._request(method, path, body=body, headers=headers, repeat=repeat).data
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ClientError(f"{method} {path}: not an answer of an archipel server ({error})") from None

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        repeat: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        for segment in path.partition("?")[0].split("/")[1:]:
            if not SEGMENT.fullmatch(segment):
                raise ClientError(f"{segment!r}: expected an id or a name of letters, digits, '.', '_' and '-'")
        retries = urllib3.Retry(
            total=3,
            allowed_methods=None,
            status_forcelist=(429, 503),
            backoff_factor=0.1,
            redirect=False,
            raise_on_status=False,
            raise_on_redirect=False,
        )
        try:
            response = self._pool.request(
                method,
                self._server + path,
                body=body,
                headers={**self._headers, **(headers or {})},
                retries=retries if method == "GET" or repeat else False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unreachable(self._server, method, path, error) from None
        if response.status >= 300:
            raise refused(response)
        return response


def _news(task: TaskInfo) -> object:
    """What is told of a task when it changes. Devices come and go, so of what it waits for only the words count."""
    waits = re.sub(r"[0-9]+", "", task.waiting_for)
    return task.state, task.rounds_committed, task.failed_rounds, task.model, waits


def _few(count: int | None) -> str:
    return "too few" if count is None else str(count)
