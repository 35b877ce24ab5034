"""What the device's owner decides: where the agent keeps its files, what it may use, and how patient it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from archipel.errors import ClientError
from archipel.protocol import written
from archipel.protocol.address import check_url
from archipel.protocol.messages import Kind

Attribute = str | float | bool
MAX_ROUNDS_PER_DAY = 256
"""The journal keeps so many rounds that were not refused."""

PublicKey = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Seconds = Annotated[float, Meta(gt=0)]
Size = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0)]


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one agent. Sizes are in bytes, times in seconds, and every number is finite.

    Raises ClientError, one line that names the setting, for a value of another type or out of its bounds.
    """

    # --- where and who ----------------------------------------------------------------------------------------------

    folder: Path
    """Key, identity, cache, journal and device state; one agent per folder."""
    server: str = ""
    """URL; empty: the one in the enrolment token. Its key stays pinned to the token's."""
    allow_http: bool = False
    """Whether the URL may be one of plain http:// to another machine: everybody on the way reads along."""
    ca_file: Path | None = None
    """PEM file of the authorities that may have certified the server's TLS certificate; None: the system's."""
    client_certificate: Path | None = None
    """PEM file that this device shows to a server that asks for a certificate."""
    client_key: Path | None = None
    """PEM file of that certificate's private key; None: it is in the same file."""
    attributes: Mapping[str, Attribute] = msgspec.field(default_factory=dict)
    """What the device tells about itself whenever it checks in, for the eligibility of tasks."""

    # --- what the owner allows --------------------------------------------------------------------------------------

    kinds: tuple[Kind, ...] = ("training", "evaluation", "analytics")
    """Of tasks that the device takes part in."""
    min_cohort: Positive = 2
    """A secure round that may have fewer devices is refused, whatever the publisher's policy allows."""
    allow_plain: bool = False
    """Whether the device takes part in rounds where the server sees its update."""
    min_contributors: Size = 0
    """Evaluations and analyses of fewer devices with examples are refused, whatever their publisher allows."""
    max_rounds_per_day: Annotated[int, Meta(ge=0, le=MAX_ROUNDS_PER_DAY)] | None = None
    """So many rounds in any 24 hours; None: any number."""
    max_epsilon: Share | None = None
    """What all rounds together may cost each local example (client.privacy, at delta 1e-6); rounds whose bundle states
    no noise are refused then. None: any, and without noise too."""
    publishers: tuple[PublicKey, ...] = ()
    """Public keys (64 hexadecimal digits, as in a .pub file); of the pinned ones only these count. Empty: all."""
    populations: tuple[str, ...] = ()
    """The device enrols in and works for these only. Empty: the one that it is enrolled in."""
    max_peak_bytes: Size = 512 << 20
    """A bundle whose programs may need more memory is refused."""
    max_upload_bytes: Size = 64 << 20
    """A bundle that uploads more in a round is refused."""
    max_upload_entries: Size = 16 << 20
    """A round that sends more numbers is refused."""
    max_query_entries: Size = 4096
    """An evaluation or analysis that sends more numbers than this is refused."""
    max_download_bytes: Size = 256 << 20
    """A larger bundle or set of weights is not fetched."""
    max_cache_bytes: Size = 512 << 20
    """Bundles and weights on disk; those that were not used for longest go first."""
    tell_why: bool = True
    """Whether the server is told which kind of limit a refused round was beyond (messages.LeaveReason)."""
    threads: Positive = 1
    """Of one operator while training."""
    isolated: bool = sys.platform == "linux"
    """Whether graphs run in a child process, which is held to these limits by the system (Linux only)."""
    max_step_seconds: Seconds = 300.0
    """So long may one training step, or an evaluation, take in that process."""
    max_cpu_seconds: Seconds = 3600.0
    """So much processor time may a round take in that process, all its threads together."""
    niceness: Annotated[int, Meta(ge=0, le=19)] = 10
    """How far that process stands back behind others, as of nice(1)."""
    adopt: bool = False
    """Whether the device takes the versions of models that the server offers. It tells which it has fetched, never
    which it runs."""
    count_adoption: bool = True
    """Whether evaluations that count adoption count this device: in a secure sum, with an answer that is untrue with a
    probability of 1/4."""
    look_seconds: Seconds = 120.0
    """After it has looked whether a version is for it, the device is silent until so long after the look began, or a
    multiple of that, so that nobody can tell from the time what came of it."""
    max_worse: Share = 0.05
    """A version that is for the device's own examples worse than the running one by more than this share of its loss
    (or accuracy) is kept out."""

    # --- patience ---------------------------------------------------------------------------------------------------

    connect_timeout: Seconds = 10.0
    """For a connection."""
    read_timeout: Seconds = 30.0
    """For a silent server."""
    request_timeout: Seconds = 300.0
    """For one request in all."""
    attempts: Positive = 4
    """How often a request is tried before the server counts as unreachable."""
    backoff: Seconds = 0.25
    """First wait between attempts; it doubles, with jitter, up to `max_wait`."""
    max_wait: Seconds = 60.0
    """The longest wait between two requests that the server or the backoff can cause while working."""
    patience: Seconds = 120.0
    """How long a round goes on without an answer from the server."""
    round_timeout: Seconds = 3600.0
    """How long a round may take in all; a server that never ends one is left."""
    pause_seconds: Seconds = 30.0
    """How long until conditions that did not hold are asked again."""
    resume_within: Seconds = 120.0
    """How long work in a round stands still, while conditions do not hold, before the device leaves it."""
    max_offline_wait: Seconds = 900.0
    """The longest wait before a server that could not be reached is tried again."""
    poll_jitter: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    """Each wait is longer or shorter by up to this share of it, so that devices do not ask all at once."""

    def __post_init__(self) -> None:
        try:
            written.conform(self)
        except ValueError as error:
            raise ClientError(str(error)) from None
        if self.server:
            check_url(self.server, allow_http=self.allow_http)
