"""Commands that talk to a server as an operator: its address, the token, files of requests, and results as text."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from archipel.cli.input_output.distributions import worst_tenths
from archipel.cli.input_output.short_ids import whole_ids
from archipel.durable import write_durably
from archipel.errors import ClientError, CommandError, RefusedError
from archipel.operator import OperatorClient
from archipel.operator.connection import ACCESS_TOKEN
from archipel.protocol import written
from archipel.protocol.address import check_url
from archipel.protocol.moments import moment
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.tls import client_context
from archipel.toml_files import read_toml

T = TypeVar("T")
SERVER, TOKEN, TOKEN_FILE = "ARCHIPEL_SERVER", "ARCHIPEL_TOKEN", "ARCHIPEL_TOKEN_FILE"
HTTP = "ARCHIPEL_ALLOW_HTTP"
CA, CERTIFICATE, KEY = "ARCHIPEL_CA", "ARCHIPEL_CLIENT_CERTIFICATE", "ARCHIPEL_CLIENT_KEY"
KEY_PATTERN = re.compile("[A-Za-z0-9_-]{16,64}")
MAX_TOKEN_FILE_BYTES = 4096


def _file(name: str, variable: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(name, type=click.Path(path_type=Path), envvar=variable, help=f"{text}  [env: {variable}]")


def remote(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command that needs a server: adds the options of the connection.

    The function gets a connected OperatorClient as its first argument, and none of these options. Ids among its other
    arguments may be typed in part (`short_ids`); it gets them whole.

    Example:
        @click.command()
        @as_json
        @remote
        def tasks(client: OperatorClient, as_json: bool) -> None: ...

    The command raises CommandError or ClientError for an address, a token or a certificate that cannot be used.
    """

    return _connected(function, None)


def remote_with(option: str, parameter: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `remote`, for a command that needs a server only where this option is given; else its client is None.

    `parameter` is the name of the function's argument for the option.
    """
    return lambda function: _connected(function, (option, parameter))


def _connected(function: Callable[..., Any], only_with: tuple[str, str] | None) -> Callable[..., Any]:
    # With `show_envvar` the error for a missing one names the variable, too.
    @click.option("--server", envvar=SERVER, show_envvar=True, required=only_with is None, help="The server's address.")
    @click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        envvar=TOKEN_FILE,
        help=f"File with the access token. Default: the token in {TOKEN}.  [env: {TOKEN_FILE}]",
    )
    @click.option(
        "--allow-http",
        is_flag=True,
        envvar=HTTP,
        help=f"Allow plain http:// to another machine, where others may read the token.  [env: {HTTP}]",
    )
    @_file("--ca", CA, "Authorities of the server's TLS certificate (PEM); default: the system's.")
    @_file("--client-certificate", CERTIFICATE, "The TLS certificate for a server that asks for one (PEM).")
    @_file("--client-key", KEY, "The certificate's private key (PEM), if it is in another file.")
    @functools.wraps(function)
    def wrapped(
        *arguments: Any,
        server: str | None,
        token_file: Path | None,
        allow_http: bool,
        ca: Path | None,
        client_certificate: Path | None,
        client_key: Path | None,
        **options: Any,
    ) -> Any:
        if only_with is not None and options[only_with[1]] is None:
            return function(None, *arguments, **options)
        if server is None:
            option = "" if only_with is None else only_with[0]
            raise CommandError(f"{option} asks a server; give --server, or set {SERVER}")
        check_url(server, f"--server or {SERVER}", allow_http=allow_http, setting=f"--allow-http or {HTTP}=1")
        tls = _tls(server, ca, client_certificate, client_key)
        name, token = _token(token_file)
        with OperatorClient(server, token, tls=tls, on_outage=_outage, allow_http=allow_http) as client:
            try:
                return function(client, *arguments, **whole_ids(client, options))
            except RefusedError as error:
                if error.status == 401:
                    # People have several tokens and servers, and the error has to say which two did not fit.
                    raise CommandError(f"{name}: {server} does not take this token: {error}") from None
                raise

    return wrapped


def _tls(server: str, ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if server.startswith("https://"):
        return client_context(ca, certificate, key)
    given = (("--ca", CA, ca), ("--client-certificate", CERTIFICATE, certificate), ("--client-key", KEY, key))
    for name, variable, file in given:
        if file is not None:
            # Somebody who gives one of these expects TLS; over http:// the token would be sent in the clear.
            raise CommandError(f"{name} or {variable} is for https://, and the server's address is {server}")
    return None


def _token(file: Path | None) -> tuple[str, str]:
    """Where the token is from, and the token."""
    # There is no option for the token itself: every user of the machine can see the command lines of all processes.
    if file is None:
        name, token = TOKEN, os.environ.get(TOKEN, "").strip()
    else:
        with open(file, "rb") as opened:
            name, token = str(file), opened.read(MAX_TOKEN_FILE_BYTES).decode("ascii", "replace").strip()
    if not token:
        raise CommandError(f"no access token: set {TOKEN}, or name a file with --token-file")
    if not ACCESS_TOKEN.fullmatch(token):
        # The file may hold another secret, such as a private key, so the message does not show its content.
        raise CommandError(f"{name}: expected an access token, one line of printable ASCII without blanks")
    return name, token


def _outage(error: ClientError | None) -> None:
    click.echo("the server is back" if error is None else f"{error}; trying again", err=True)


def request_key(noun: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --key of a command that creates a `noun`, such as a task. A retry with it creates no second one."""

    def check(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and not KEY_PATTERN.fullmatch(value):
            raise click.BadParameter(f"expected 16 to 64 letters, digits, '-' or '_', got {value[:100]!r}")
        return value

    text = f"With the same key (16 to 64 letters, digits, - or _) the same {noun} is made only once."
    return click.option("--key", callback=check, help=text)


def read_request(file: Path, kind: type[T], **more: object) -> T:
    """Read a request of type `kind` from `file` (TOML); `more` adds or replaces fields.

    Raises CommandError that names the file and the field that is wrong, OSError.
    """
    try:
        return written.convert({**read_toml(file), **more}, kind)
    except ValueError as error:
        raise CommandError(f"{file}: {error}") from None


def save(file: Path, fetch: Callable[[], bytes], digest: str | None = None) -> None:
    """Write the bytes that `fetch` returns into the new file `file`, whole or not at all.

    `digest` is the SHA-256 that they must have, None for a bundle, whose digest is not that of its file.

    Raises CommandError for a file that exists already and for other bytes, OSError.
    """
    if file.exists():
        raise CommandError(f"{file}: exists already; choose another name")
    # Fetched after that check, since a download may take minutes.
    data = fetch()
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise CommandError(f"{file}: not written, the server sent other bytes than those with SHA-256 {digest}")
    write_durably(file, data, 0o666)
    click.echo(f"{file}: {len(data)} bytes")


def result_line(result: RoundResult | None) -> str:
    """The metrics and statistics of a round that are single numbers, in one line."""
    if result is None:
        return ""
    single = {name: each.value for name, each in result.statistics.items() if each.value is not None}
    return metrics_line({**result.metrics, **single, **worst_tenths(result.distributions)}, result.clamped)


def metrics_line(metrics: Mapping[str, float], clamped: Mapping[str, float]) -> str:
    """Names and numbers in one line, with a mark at each that some device had to clamp (`clamped`: share by name)."""
    beyond = {name: " (beyond its range)" for name, share in clamped.items() if share}
    return ", ".join(f"{name} {value:.6g}{beyond.get(name, '')}" for name, value in metrics.items())


def fields(values: msgspec.Struct, *, times: Collection[str] = (), without: Collection[str] = ()) -> list[str]:
    """Lines with the name and the value of each field; nested fields are indented, empty ones left out.

    Arguments:
        values: the struct to show.
        times: fields that are Unix seconds, shown as dates.
        without: fields that are not shown.
    """
    shown = {name: value for name, value in msgspec.to_builtins(values).items() if name not in without}
    shown.update({name: moment(shown[name]) for name in times if shown[name] is not None})
    return field_lines(shown)


def field_lines(values: Mapping[str, Any]) -> list[str]:
    """The same of names and values, in their order."""
    rows = list(_rows(values, ""))
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in rows]


def _rows(values: Mapping[str, Any], indent: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if value in (None, "", [], (), {}):
            continue
        yield indent + name, "" if isinstance(value, dict) else _text(value)
        if isinstance(value, dict):
            yield from _rows(value, indent + "  ")


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return " ".join(f"{name}={_text(each)}" for name, each in value.items())
    return str(value)
