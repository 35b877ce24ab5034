"""The errors of the operator's client when there is no answer, or one that is an error."""

from __future__ import annotations

import http.client
import ssl

import msgspec
import urllib3

from archipel.errors import RefusedError, UnreachableError
from archipel.protocol.messages import Problem
from archipel.protocol.problems import KINDS

_UNKNOWN_AUTHORITY = {2, 18, 19, 20, 21}
"""OpenSSL's X509_V_ERR codes of a certificate chain that does not end with a trusted authority."""
_PLAIN = "it speaks no TLS there; the address of a server without TLS starts with http://"
_TLS = "the address of a server with TLS starts with https://"
_ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server asks for a certificate; give one with --client-certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "the server does not know the authority of the --client-certificate",
    "WRONG_VERSION_NUMBER": _PLAIN,
    "RECORD_LAYER_FAILURE": _PLAIN,  # the same in newer versions of OpenSSL
}


def unreachable_error(server: str, method: str, path: str, error: Exception) -> UnreachableError:
    """The error for a request that `error` ended without an answer."""
    return UnreachableError(f"{server}: no answer to {method} {path} ({_reason(server, _innermost(error))})")


def refused_error(response: urllib3.BaseHTTPResponse) -> RefusedError:
    """The error for an answer with an error status."""
    retry_after = response.headers.get("Retry-After", "")
    seconds = float(retry_after) if retry_after.isdigit() else None
    try:
        problem = msgspec.json.decode(response.data, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RefusedError(response.status, "unknown", "not an answer of an archipel server", seconds)
    kind = KINDS.get(response.status, "unknown")
    return RefusedError(response.status, kind, problem.detail, seconds, problem.request_id)


def _innermost(error: BaseException) -> BaseException:
    # urllib3 wraps the system's error, which says what is wrong: in `reason`, in arguments, or as a cause.
    while True:
        wrapped = getattr(error, "reason", None)
        if not isinstance(wrapped, BaseException):
            wrapped = next((each for each in error.args if isinstance(each, BaseException)), error.__cause__)
        if wrapped is None:
            return error
        error = wrapped


def _reason(server: str, error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "; give its authority with --ca" if error.verify_code in _UNKNOWN_AUTHORITY else ""
        return f"certificate verify failed: {error.verify_message.rstrip('.')}{remedy}"
    if isinstance(error, ssl.SSLError):
        return _ALERTS.get(error.reason or "", str(error))
    if isinstance(error, http.client.RemoteDisconnected):
        return "it closed the connection" + ("" if server.startswith("https") else f"; {_TLS}")
    if isinstance(error, TimeoutError | urllib3.exceptions.TimeoutError):
        return "it took too long"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error)
