"""The connection to one server: requests with an access token, sent again where that is safe, and typed answers."""

from __future__ import annotations

import re
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec
import urllib3

from archipel.errors import ClientError
from archipel.operator.answers import refused_error, unreachable_error
from archipel.operator.former_names import FormerMethod
from archipel.protocol.address import check_url
from archipel.protocol.operator.tasks import IDEMPOTENCY_HEADER
from archipel.protocol.problems import TELLS_WHEN

T = TypeVar("T")
Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)
OnOutage = Callable[[ClientError | None], None]
PAGE = 100
"""Items of a list in one request."""
PART = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
"""An id or a name in a path. It has no slash and is not "..", so it cannot lead to another path."""
ACCESS_TOKEN = re.compile("[!-~]{1,256}")
"""Printable ASCII without blanks: anything else is the content of some other file."""


class Page(Protocol[Item_co]):
    """One part of a list; `next` is the query's `after` for the next part, None where this is the last."""

    @property
    def items(self) -> Sequence[Item_co]: ...

    @property
    def next(self) -> str | int | None: ...


class Connection:
    """Sends the requests of the resources.

    Every request raises UnreachableError where no answer comes, RefusedError where the answer is an error status, and
    ClientError where the answer is not an archipel server's. `make_path` makes paths with an id or a name.
    `on_outage` is used by archipel.operator.waiting.
    """

    def __init__(
        self,
        server: str,
        token: str,
        *,
        timeout: float,
        tls: ssl.SSLContext | None,
        on_outage: OnOutage | None,
        allow_http: bool,
    ) -> None:
        check_url(server, allow_http=allow_http)
        if not ACCESS_TOKEN.fullmatch(token):
            raise ClientError("access token: expected at most 256 printable ASCII characters without blanks")
        self.on_outage = on_outage
        self._server = server.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(timeout=timeout, ssl_context=tls)

    def close(self) -> None:
        self._pool.clear()

    def get(self, path: str, kind: type[T], /, **query: str | int | None) -> T:
        """The `kind` that is at `path`. Values of None are left out of the query."""
        return self._decoded("GET", path + _query(query), kind, again=True)

    def pages(self, path: str, kind: type[Page[Item]], /, **query: str | int | None) -> Iterator[Item]:
        """The items of a list, whose parts are of `kind`; each part is fetched when it is reached."""
        while True:
            page = self.get(path, kind, limit=PAGE, **query)
            yield from page.items
            if page.next is None:
                return
            query["after"] = page.next

    def download(self, path: str) -> bytes:
        """The file at `path`."""
        return self._send("GET", path, again=True).data

    def post(self, path: str, kind: type[T], body: msgspec.Struct | None = None, *, key: str | None = None) -> T:
        """Ask for a change that the server makes once, however often the request has to be sent.

        `key` is the idempotency key, 16 to 64 letters, digits, "-" or "_"; None: a new one for this call.
        """
        headers = {IDEMPOTENCY_HEADER: key or secrets.token_urlsafe(24)}
        return self._post(path, kind, body, headers, again=True)

    def post_once(self, path: str, kind: type[T], body: msgspec.Struct) -> T:
        """Ask for a change that the server would make again for every request, so that it is sent only once."""
        return self._post(path, kind, body, {}, again=False)

    def upload(self, path: str, kind: type[T], file: BinaryIO, *, size: int, media_type: str, **query: str | None) -> T:
        """Send the `size` bytes of a file, once: a file that was read in part cannot be sent again."""
        headers = {"Content-Type": media_type, "Content-Length": str(size)}
        return self._decoded("POST", path + _query(query), kind, body=file, headers=headers)

    def _post(
        self, path: str, kind: type[T], body: msgspec.Struct | None, headers: dict[str, str], *, again: bool
    ) -> T:
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else msgspec.json.encode(body)
        return self._decoded("POST", path, kind, body=data, headers=headers, again=again)

    def _decoded(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: bytes | BinaryIO | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool = False,
    ) -> T:
        data = self._send(method, path, body=body, headers=headers, again=again).data
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ClientError(f"{method} {path}: not an answer of an archipel server ({error})") from None

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | BinaryIO | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool,
    ) -> urllib3.BaseHTTPResponse:
        # No redirect is followed: the token is for this address only. Statuses are not raised, so that the error shape
        # of the last answer can be read.
        retries = urllib3.Retry(
            total=3,
            allowed_methods=None,
            status_forcelist=TELLS_WHEN,
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
                retries=retries if again else False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unreachable_error(self._server, method, path, error) from None
        if response.status >= 300:
            raise refused_error(response)
        return response


class Resource(FormerMethod):
    """A part of OperatorClient: the calls about one kind of thing."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


def make_path(*parts: str | int) -> str:
    """The path of a route from words, ids, names and numbers. Raises ClientError for a part with other characters."""
    for part in map(str, parts):
        if not PART.fullmatch(part):
            raise ClientError(f"{part!r}: expected an id or a name of letters, digits, '.', '_' and '-'")
    return "/".join(["/v1", *map(str, parts)])


def _query(values: Mapping[str, str | int | None]) -> str:
    chosen = {name: value for name, value in values.items() if value is not None}
    return f"?{urlencode(chosen)}" if chosen else ""
