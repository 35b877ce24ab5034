"""The uplink: an agent that is a member of the upstream server for this one."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from archipel.client import Agent, AgentConfig, Event
from archipel.edge.site import EdgeSite
from archipel.errors import ClientError, MessageError, ServerError, UnreachableError
from archipel.protocol.backoff import Backoff
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.messages import TokenCertificate
from archipel.protocol.sealed import decode
from archipel.server.services import Services
from archipel.server.upstream_settings import Upstream

log = logging.getLogger("archipel.edge")

DAY = 86400.0
_MAX_TOKEN_BYTES = 64 << 10
_QUIET = ("waiting", "advertised", "shared", "confirmed", "unmasked", "uploaded")


def agent_config(services: Services, upstream: Upstream) -> AgentConfig:
    """The limits of the agent. The publisher's policy decides about rounds, and the upstream's deadlines about time."""
    path = services.settings.path
    return AgentConfig(
        folder=path(upstream.folder),
        server=upstream.address,
        allow_http=upstream.allow_http,
        ca_file=path(upstream.ca_file) if upstream.ca_file else None,
        otlp_address=services.settings.otlp_address,
        allow_development=services.settings.allow_development,
        max_peak_bytes=1 << 50,
        max_upload_bytes=upstream.max_bytes,
        max_upload_entries=1 << 40,
        max_query_entries=1 << 40,
        max_download_bytes=upstream.max_bytes,
        max_cache_bytes=4 * upstream.max_bytes,
        isolated=False,
        pause_seconds=1.0,
        # Its one condition is that of `EdgeSite.may_work`, which time does not change.
        resume_within=0.1,
        max_wait=2.0,
        max_offline_wait=30.0,
        # The upstream may be away for as long as its round lives: its own deadlines say when the sum is of no more use.
        patience=DAY,
        round_timeout=DAY,
    )


def read_upstream_token(path: Path) -> EnrolmentToken:
    """The token in a file. Raises ServerError, which names the file and the remedy."""
    remedy = "copy a file of `archipel token --aggregator` there (setting upstream.token)"
    try:
        data = path.read_bytes()[: _MAX_TOKEN_BYTES + 1]
        if len(data) > _MAX_TOKEN_BYTES:
            raise MessageError(f"more than {_MAX_TOKEN_BYTES} bytes")
        token = decode("token", data, EnrolmentToken)
        kind = decode("token", token.certificate.body, TokenCertificate).kind
    except OSError as error:
        raise ServerError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except MessageError as error:
        raise ServerError(f"{path}: no enrolment token ({error}); {remedy}") from None
    if kind != "aggregator":
        raise ServerError(f"{path}: a token for a {kind}; an edge server needs one of `archipel token --aggregator`")
    return token


def run_uplink(services: Services, upstream: Upstream, stop: threading.Event) -> None:
    """Enrol if need be, then take part in the upstream's rounds until `stop` is set. An upstream that is away is asked
    again. Raises ServerError or ClientError where the token, the folder or the upstream's answer is wrong."""

    def tell(event: Event) -> None:
        if event.name not in _QUIET:
            log.info("upstream: %s %s %s", event.name, event.round_id, dict(event.detail) or "")

    site = EdgeSite(services, upstream)
    with Agent(
        agent_config(services, upstream), examples=dict, on_event=tell, conditions=site.may_work, site=site
    ) as agent:
        if not agent.device_id:
            token, failures = read_upstream_token(services.settings.path(upstream.token)), 0
            wait = Backoff(0.5, longest=30.0)
            while not stop.is_set():
                try:
                    agent.enrol(token)
                    break
                except UnreachableError as error:
                    failures += 1
                    log.info("upstream: %s", error)
                    stop.wait(wait.after(failures))
        if not stop.is_set():
            agent.run_forever(stop)


def check_upstream(services: Services) -> Upstream:
    """The settings of the upstream. Raises ClientError where there are none."""
    upstream = services.settings.upstream
    if upstream is None:
        raise ClientError(f"{services.settings.folder}: no table [upstream] in its settings, so no uplink")
    return upstream
