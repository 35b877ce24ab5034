"""What the device's owner decides: where the agent keeps its files, what it may use, and how patient it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from archipel.errors import ClientError
from archipel.protocol.address import check_url

Attribute = str | float | bool


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of one agent. Sizes are in bytes, times in seconds. Raises ClientError for a value out of range."""

    folder: Path
    """Key, identity, cache, journal and device state; one agent per folder."""
    server: str = ""
    """URL; empty: the one in the enrolment token. Its key stays pinned to the token's."""
    ca_file: Path | None = None
    """PEM file of the authorities that may have certified the server's TLS certificate; None: those of the system."""
    client_certificate: Path | None = None
    """PEM file of the certificate that this device shows to a server that asks for one."""
    client_key: Path | None = None
    """PEM file of its private key; None: it is in the same file."""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    """What the device tells about itself when it checks in."""
    allow_plain: bool = False
    """Whether the device takes part in rounds where the server sees its update."""
    max_peak_bytes: int = 512 << 20
    """A bundle whose programs may need more memory is refused."""
    max_upload_bytes: int = 64 << 20
    """A bundle that uploads more in a round is refused."""
    max_download_bytes: int = 256 << 20
    """A larger bundle or set of weights is not fetched."""
    max_cache_bytes: int = 512 << 20
    """Bundles and weights that were not used for longest go first."""
    threads: int = 1
    """Threads of one operator while training."""
    connect_timeout: float = 10.0
    read_timeout: float = 30.0
    """How long the server may be silent."""
    request_timeout: float = 300.0
    """How long one request may take in all."""
    attempts: int = 4
    """How often a request is tried before the server counts as unreachable."""
    backoff: float = 0.25
    """First wait between attempts; it doubles, with jitter, up to `max_wait`."""
    max_wait: float = 60.0
    """The longest wait between two requests that the server or the backoff can cause while working."""
    patience: float = 120.0
    """How long a round goes on without an answer from the server."""
    round_timeout: float = 3600.0
    """How long a round may take in all; a server that never ends one is left."""
    pause_seconds: float = 30.0
    """How long until conditions that did not hold are asked again."""
    poll_jitter: float = 0.2
    """Each wait is longer or shorter by up to this share of it, so that devices do not ask all at once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        for name in ("ca_file", "client_certificate", "client_key"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.server:
            check_url(self.server)
        for name in ("max_peak_bytes", "max_upload_bytes", "max_download_bytes", "max_cache_bytes"):
            if getattr(self, name) < 0:
                raise ClientError(f"{name} must not be negative, is {getattr(self, name)}")
        for name in ("threads", "attempts"):
            if getattr(self, name) < 1:
                raise ClientError(f"{name} must be at least 1, is {getattr(self, name)}")
        for name in (
            "connect_timeout",
            "read_timeout",
            "request_timeout",
            "backoff",
            "max_wait",
            "patience",
            "round_timeout",
            "pause_seconds",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ClientError(f"{name} must be above 0 seconds and finite, is {getattr(self, name)}")
        if not 0 <= self.poll_jitter < 1:
            raise ClientError(f"poll_jitter must be from 0 to below 1, is {self.poll_jitter}")
