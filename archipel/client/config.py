"""What the device's owner decides: where the agent keeps its files, what it may use, and how patient it is."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from archipel.errors import ClientError
from archipel.protocol.address import check_url
from archipel.protocol.messages import Kind

Attribute = str | float | bool
MAX_ROUNDS_PER_DAY = 256
"""The journal keeps so many rounds that were not refused."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of one agent. Sizes are in bytes, times in seconds. Raises ClientError for a value out of range.

    Where and who:

    folder: key, identity, cache, journal and device state; one agent per folder.
    server: URL; empty: the one in the enrolment token. Its key stays pinned to the token's.
    allow_http: whether the URL may be one of plain http:// to another machine: everybody on the way reads along.
    ca_file: PEM file of the authorities that may have certified the server's TLS certificate; None: the system's.
    client_certificate, client_key: PEM files that this device shows to a server that asks for a certificate; a key of
        None is in the certificate's file.
    attributes: what the device tells about itself whenever it checks in, for the eligibility of tasks.

    What the owner allows:

    kinds: of tasks that the device takes part in.
    min_cohort: a secure round that may have fewer devices is refused, whatever the publisher's policy allows.
    allow_plain: whether the device takes part in rounds where the server sees its update.
    min_contributors: evaluations and analyses of fewer devices with examples are refused, whatever their publisher
        allows.
    max_rounds_per_day: so many rounds in any 24 hours; None: any number.
    max_epsilon: what all rounds together may cost each local example (client.privacy, at delta 1e-6); rounds whose
        bundle states no noise are refused then. None: any, and without noise too.
    publishers: public keys (64 hexadecimal digits, as in a .pub file); of the pinned ones only these count. Empty: all.
    populations: the device enrols in and works for these only. Empty: the one that it is enrolled in.
    max_upload_entries: a round that sends more numbers is refused.
    max_query_entries: so is an evaluation or analysis that sends more than this.
    tell_why: whether the server is told which kind of limit a refused round was beyond (messages.LeaveReason).
    max_peak_bytes: a bundle whose programs may need more memory is refused.
    max_upload_bytes: a bundle that uploads more in a round is refused.
    max_download_bytes: a larger bundle or set of weights is not fetched.
    max_cache_bytes: bundles and weights on disk; those that were not used for longest go first.
    threads: of one operator while training.
    isolated: whether graphs run in a child process, which is held to these limits by the system (Linux only).
    max_step_seconds: so long may one training step, or an evaluation, take in that process.
    max_cpu_seconds: so much processor time may a round take in that process, all its threads together.
    niceness: how far that process stands back behind others, as of nice(1), from 0 to 19.
    adopt: whether the device takes the versions of models that the server offers. It tells which it has fetched, never
        which it runs.
    look_seconds: after it has looked whether a version is for it, the device is silent until so long after the look
        began, or a multiple of that, so that nobody can tell from the time what came of it.
    max_worse: a version that is for the device's own examples worse than the running one by more than this share of
        its loss (or accuracy) is kept out.

    Patience:

    connect_timeout, read_timeout, request_timeout: for a connection, for a silent server, for one request in all.
    attempts: how often a request is tried before the server counts as unreachable.
    backoff: first wait between attempts; it doubles, with jitter, up to `max_wait`.
    max_wait: the longest wait between two requests that the server or the backoff can cause while working.
    patience: how long a round goes on without an answer from the server.
    round_timeout: how long a round may take in all; a server that never ends one is left.
    pause_seconds: how long until conditions that did not hold are asked again.
    resume_within: how long work in a round stands still, while conditions do not hold, before the device leaves it.
    max_offline_wait: the longest wait before a server that could not be reached is tried again.
    poll_jitter: each wait is longer or shorter by up to this share of it, so that devices do not ask all at once.
    """

    folder: Path
    server: str = ""
    allow_http: bool = False
    ca_file: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ("training", "evaluation", "analytics")
    min_cohort: int = 2
    allow_plain: bool = False
    min_contributors: int = 0
    max_rounds_per_day: int | None = None
    max_epsilon: float | None = None
    publishers: tuple[str, ...] = ()
    populations: tuple[str, ...] = ()
    max_peak_bytes: int = 512 << 20
    max_upload_bytes: int = 64 << 20
    max_upload_entries: int = 16 << 20
    max_query_entries: int = 4096
    max_download_bytes: int = 256 << 20
    max_cache_bytes: int = 512 << 20
    tell_why: bool = True
    threads: int = 1
    isolated: bool = sys.platform == "linux"
    max_step_seconds: float = 300.0
    max_cpu_seconds: float = 3600.0
    niceness: int = 10
    adopt: bool = False
    look_seconds: float = 120.0
    max_worse: float = 0.05
    connect_timeout: float = 10.0
    read_timeout: float = 30.0
    request_timeout: float = 300.0
    attempts: int = 4
    backoff: float = 0.25
    max_wait: float = 60.0
    patience: float = 120.0
    round_timeout: float = 3600.0
    pause_seconds: float = 30.0
    resume_within: float = 120.0
    max_offline_wait: float = 900.0
    poll_jitter: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        for name in ("ca_file", "client_certificate", "client_key"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.server:
            check_url(self.server, allow_http=self.allow_http)
        for name in ("min_contributors", "max_peak_bytes", "max_upload_bytes", "max_download_bytes", "max_cache_bytes"):
            if getattr(self, name) < 0:
                raise ClientError(f"{name} must not be negative, is {getattr(self, name)}")
        for name in ("max_upload_entries", "max_query_entries"):
            if getattr(self, name) < 0:
                raise ClientError(f"{name} must not be negative, is {getattr(self, name)}")
        self._check_limits()
        for name in ("threads", "attempts", "min_cohort"):
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
            "resume_within",
            "max_offline_wait",
            "max_step_seconds",
            "max_cpu_seconds",
            "look_seconds",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ClientError(f"{name} must be above 0 seconds and finite, is {getattr(self, name)}")
        if not 0 <= self.max_worse < float("inf"):
            raise ClientError(f"max_worse must not be negative and be finite, is {self.max_worse}")
        if not 0 <= self.niceness <= 19:
            raise ClientError(f"niceness must be from 0 to 19, is {self.niceness}")
        if not 0 <= self.poll_jitter < 1:
            raise ClientError(f"poll_jitter must be from 0 to below 1, is {self.poll_jitter}")

    def _check_limits(self) -> None:
        for name in ("kinds", "publishers", "populations"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for kind in self.kinds:
            if kind not in get_args(Kind):
                raise ClientError(f"kinds: expected some of {', '.join(get_args(Kind))}, got {kind!r}")
        for key in self.publishers:
            if not re.fullmatch("[0-9a-f]{64}", key):
                raise ClientError(f"publishers: expected public keys, each 64 hexadecimal digits, got {key[:100]!r}")
        if self.max_rounds_per_day is not None and not 0 <= self.max_rounds_per_day <= MAX_ROUNDS_PER_DAY:
            raise ClientError(
                f"max_rounds_per_day must be from 0 to {MAX_ROUNDS_PER_DAY}, is {self.max_rounds_per_day}"
            )
        if self.max_epsilon is not None and not 0 <= self.max_epsilon < float("inf"):
            raise ClientError(f"max_epsilon must not be negative and be finite, is {self.max_epsilon}")
