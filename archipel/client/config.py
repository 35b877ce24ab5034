"""The owner's settings: where the agent keeps its files, what it may use, and how long it waits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from archipel.engine_registry import ENGINES
from archipel.errors import ClientError
from archipel.protocol import written
from archipel.protocol.address import check_url
from archipel.protocol.messages import Kind

Attribute = str | float | bool
MAX_ROUNDS_PER_DAY = 256
"""The journal keeps this many rounds that were not refused, so it cannot count more."""

PublicKey = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Seconds = Annotated[float, Meta(gt=0)]
Size = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0)]


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one agent. Sizes are in bytes, times in seconds, and every number is finite.

    Raises:
        ClientError: a value has another type or is out of its bounds; one line that names the setting.

    Example:
        config = AgentConfig(folder=Path("device"), attributes={"app": "2.1"}, max_peak_bytes=256 << 20)
    """

    # --- where and who ----------------------------------------------------------------------------------------------

    folder: Path
    """Holds the key, identity, cache, journal and device state; one agent at a time uses it."""
    server: str = ""
    """The server's URL; empty: the one in the enrolment token. The pinned key stays that of the token."""
    allow_http: bool = False
    """Whether the URL may be plain http:// to another machine; anybody on the way can then read along."""
    ca_file: Path | None = None
    """PEM file of the authorities that may certify the server's TLS certificate; None: the system's."""
    client_certificate: Path | None = None
    """PEM file that this device shows to a server that asks for a certificate."""
    client_key: Path | None = None
    """PEM file of the private key of `client_certificate`; None: the key is in that file."""
    attributes: Mapping[str, Attribute] = msgspec.field(default_factory=dict)
    """What the device reports about itself at every check-in, for the eligibility of tasks."""

    # --- what the owner allows --------------------------------------------------------------------------------------

    kinds: tuple[Kind, ...] = ("training", "evaluation", "analytics")
    """The kinds of tasks that the device takes part in."""
    min_cohort: Positive = 2
    """The agent refuses a secure round that may have fewer devices, whatever the publisher's policy allows."""
    allow_plain: bool = False
    """Whether the device takes part in rounds where the server sees its update."""
    min_contributors: Size = 0
    """The agent refuses evaluations and analyses whose sums may be of fewer devices with examples."""
    max_rounds_per_day: Annotated[int, Meta(ge=0, le=MAX_ROUNDS_PER_DAY)] | None = None
    """The most rounds in any 24 hours; None: any number."""
    max_epsilon: Share | None = None
    """The most epsilon that all rounds together may cost each local example (memory/privacy.py, at delta 1e-6). With a
    limit the agent refuses rounds whose bundle states no noise. None: no limit."""
    publishers: tuple[PublicKey, ...] = ()
    """Public keys (64 hexadecimal digits, as in a .pub file): of the pinned keys only these count. Empty: all."""
    allow_development: bool = False
    """Whether the device uses bundles that a development key signed; such keys are for trying out only."""
    populations: tuple[str, ...] = ()
    """The device enrols in these populations only, and works for no other. Empty: any."""
    max_peak_bytes: Size = 512 << 20
    """The agent refuses a bundle whose programs may need more memory."""
    max_upload_bytes: Size = 64 << 20
    """The agent refuses a bundle that uploads more bytes in a round."""
    max_upload_entries: Size = 16 << 20
    """The agent refuses a round that sends more numbers."""
    max_query_entries: Size = 4096
    """The agent refuses an evaluation or analysis that sends more numbers."""
    max_download_bytes: Size = 256 << 20
    """The agent does not fetch larger bundles or weights."""
    max_cache_bytes: Size = 512 << 20
    """How many bytes of bundles and weights stay on disk; the agent removes the least recently used first."""
    tell_why: bool = True
    """Whether the agent tells the server which kind of limit a refused round exceeded (messages.LeaveReason)."""
    otlp_address: str = ""
    """Where the owner has OpenTelemetry spans of rounds sent (OTLP over HTTP), such as http://localhost:4318; empty:
    nowhere. No server can set it."""
    threads: Positive = 1
    """Threads of one operator during training."""
    engine: str = "onnxruntime"
    """What runs the graphs: "onnxruntime", or an engine beside it, alone, with its device: "torch", "torch:cuda:1",
    "openvino"."""
    isolated: bool = sys.platform == "linux"
    """Whether graphs run in a child process, where the kernel enforces the limits (Linux only)."""
    max_step_seconds: Seconds = 300.0
    """How long one training step, or an evaluation, may take in that process."""
    max_cpu_seconds: Seconds = 3600.0
    """How much processor time a round may take in that process, over all its threads."""
    niceness: Annotated[int, Meta(ge=0, le=19)] = 10
    """How much that process gives way to others, as of nice(1)."""
    starter_seconds: Annotated[float, Meta(ge=0)] = 60.0
    """After a round, how long a process without secrets stays from which that of the next round is forked, which saves
    most of its start; 0: each starts anew."""
    adopt: bool = False
    """Whether the device takes the versions of models that the server offers. The agent reports which version it has
    fetched, and never which one runs."""
    count_adoption: bool = True
    """Whether secure evaluations that count adoption count this device, with an answer that is untrue with a
    probability of 1/4."""
    look_seconds: Seconds = 120.0
    """After the agent has decided about a fetched version, it sends nothing until this many seconds, or a multiple of
    them, have passed since it began: the time that it took must not tell the server what it decided."""
    max_worse: Share = 0.05
    """The agent does not adopt a version that is worse on the device's own examples by more than this share of the
    running version's loss (or accuracy)."""

    # --- patience ---------------------------------------------------------------------------------------------------

    connect_timeout: Seconds = 10.0
    """How long opening a connection may take."""
    read_timeout: Seconds = 30.0
    """How long the server may be silent within an answer."""
    request_timeout: Seconds = 300.0
    """How long one answer may take in all."""
    attempts: Positive = 4
    """How often a request is tried before the server counts as unreachable."""
    backoff: Seconds = 0.25
    """The first wait between attempts; it doubles, with jitter, up to `max_wait`."""
    max_wait: Seconds = 60.0
    """The longest wait between two requests of a round, whether the server asks for it or the backoff."""
    wait_seconds: Annotated[float, Meta(ge=0, le=300)] = 20.0
    """How long the server may keep the answer to a check-in back, until the device is in a round; 0: not at all."""
    patience: Seconds = 120.0
    """How long a round goes on without an answer from the server, until the device leaves it. Of an update that is
    uploaded in parts each part has an answer."""
    round_timeout: Seconds = 3600.0
    """How long a round may take in all, until the device leaves it."""
    pause_seconds: Seconds = 30.0
    """After how long the agent asks again whether conditions hold that did not."""
    resume_within: Seconds = 120.0
    """How long work in a round may stand still because conditions do not hold, until the device leaves it."""
    max_offline_wait: Seconds = 900.0
    """The longest wait until the agent tries an unreachable server again."""
    poll_jitter: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    """Each wait is longer or shorter by up to this share, so that devices do not all ask at once."""

    def __post_init__(self) -> None:
        # msgspec checks types and bounds when it decodes only; a config made in a program must not escape them.
        try:
            written.conform(self)
        except ValueError as error:
            raise ClientError(str(error)) from None
        name = self.engine.partition(":")[0]
        if self.engine != "onnxruntime" and name not in ENGINES:
            raise ClientError(f"engine: {self.engine!r} is none; choose from onnxruntime, {', '.join(sorted(ENGINES))}")
        if self.server:
            check_url(self.server, allow_http=self.allow_http)

    @property
    def delegates(self) -> str | list[str]:
        """The engine as `lite_runtime.load` takes it."""
        return "auto" if self.engine == "onnxruntime" else [self.engine]

    def require_engine(self) -> None:
        """Raises MissingExtraError where the engine is not installed."""
        if self.engine != "onnxruntime":
            ENGINES[self.engine.partition(":")[0]].require()
