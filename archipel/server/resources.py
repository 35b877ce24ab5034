"""What the operator's side of the API speaks; the devices' side is in archipel.protocol.messages."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.protocol.messages import MAX_COHORT, DeviceId, Digest, Key, Message, Name, Phase, RoundId
from archipel.server.eligibility import MAX_CHARACTERS

Count = Annotated[int, Meta(ge=1, le=MAX_COHORT)]
MAX_PAGE = 500
IDEMPOTENCY_HEADER = "Idempotency-Key"
Deadline = Annotated[float, Meta(gt=0, le=86400)]
AccessRole = Literal["operator", "auditor", "admin"]
TaskState = Literal["running", "paused", "completed", "cancelled", "failed"]
DeadlinePhase = Literal["assigning", "advertising", "sharing", "masking", "confirming", "unmasking", "aggregating"]


class PageQuery(Message, frozen=True, kw_only=True):
    """At most `limit` items, those that follow the item with the id `after`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: RoundId | None = None


class Health(Message, frozen=True, kw_only=True):
    status: Literal["ok"]
    version: str


class ServerInfo(Message, frozen=True, kw_only=True):
    """The server's public key and the key that certifies enrolment tokens."""

    server_key: Key
    enrolment_key: Key
    version: str


class BundleInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`digest` is the SHA-256 of manifest.json, `bytes` the size of the .bundle file."""

    digest: Digest
    name: str
    bytes: int
    strategy: str


class TaskRequest(Message, frozen=True, kw_only=True):
    """Train `bundle` over `population` for `rounds` rounds.

    `cohort` devices are assigned to each round, at least `min_cohort` of them must come through; `threshold` is that of
    secret sharing (None: the smallest that the bundle's privacy policy allows). The masking phase ends early when
    `goal` updates are in; a cohort above it is over-selection against those that drop out. `deadlines` are in seconds.
    `hyperparameters` go to the devices or to the strategy.

    `eligibility` is an expression over the attributes that devices report (see archipel.server.eligibility). A device
    gives at most `max_contributions` updates, and rests for `rest_seconds` from the start of a round that it was in.
    """

    name: Name
    population: Name
    bundle: Digest
    rounds: Annotated[int, Meta(ge=1, le=1_000_000)]
    min_cohort: Count
    cohort: Count
    privacy: Literal["secure"] = "secure"
    threshold: Count | None = None
    goal: Count | None = None
    eligibility: Annotated[str, Meta(max_length=MAX_CHARACTERS)] = ""
    max_contributions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    rest_seconds: Annotated[float, Meta(ge=0, le=31_536_000)] = 0.0
    hyperparameters: dict[str, float] = {}
    deadlines: dict[DeadlinePhase, Deadline] = {}


class TaskInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`model` is the digest of the newest weights (null until the first round was opened), `waiting` the number of
    devices that are checking in and may be taken now."""

    task_id: RoundId
    name: Name
    population: Name
    bundle: Digest
    state: TaskState
    reason: str
    rounds: int
    rounds_committed: int
    failed_rounds: int
    privacy: Literal["secure"]
    min_cohort: int
    cohort: int
    threshold: int
    goal: int | None
    eligibility: str
    max_contributions: int | None
    rest_seconds: float
    hyperparameters: dict[str, float]
    deadlines: dict[str, float]
    model: Digest | None
    waiting: int
    created: float
    ended: float | None


class TaskPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[TaskInfo]
    next: RoundId | None


class ParticipantInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`furthest` is the last phase that the device answered in; `assigning`: it was not heard of since."""

    device_id: DeviceId
    furthest: Phase
    bytes_uploaded: int


class RoundInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`survivors` are the devices whose updates are in the sum; `weight_sum` is the sum of their weights.

    `number` is that of the model version which the round makes; a round that repeats a failed one has the same.
    """

    round_id: RoundId
    task_id: RoundId
    number: int
    phase: Phase
    phase_ends: float
    reason: str
    participants: list[ParticipantInfo]
    survivors: list[DeviceId]
    weights_in: Digest
    weights_out: Digest | None
    weight_sum: float | None
    started: float
    ended: float | None


class RoundPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Oldest first; `next` is the `after` of the next page, null on the last."""

    items: list[RoundInfo]
    next: RoundId | None


class TokenRequest(Message, frozen=True, kw_only=True):
    """`populations`: those that the token may deal with, null: all. `seconds`: how long it is valid, null: for ever."""

    name: Name
    role: AccessRole
    populations: Annotated[list[Name], Meta(min_length=1, max_length=1000)] | None = None
    seconds: Annotated[float, Meta(gt=0, le=3_153_600_000)] | None = None


class TokenInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What a token is for; times in Unix seconds, null where it does not expire or was not revoked."""

    token_id: RoundId
    name: Name
    role: AccessRole
    populations: list[Name] | None
    created: float
    expires: float | None
    revoked: float | None


class NewToken(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`token` goes into `Authorization: Bearer`; the server keeps its hash only."""

    token: str
    info: TokenInfo

    def __repr__(self) -> str:
        return f"NewToken(token=..., info={self.info!r})"


class TokenPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[TokenInfo]
    next: RoundId | None


class AuditEntry(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`actor` is such as "operator:ID", "device:ID" or "coordinator"; `time` in whole microseconds since 1970.

    `hash` is SHA-256 of the other fields as JSON (keys sorted, no blanks, UTF-8), `previous` that of the entry before.
    """

    seq: Annotated[int, Meta(ge=1)]
    time: int
    actor: str
    action: str
    subject: str
    detail: dict[str, str | int | float | bool | None]
    previous: Digest
    hash: Digest


class AuditQuery(Message, frozen=True, kw_only=True):
    """At most `limit` entries, those that follow number `after`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    after: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0


class AuditPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Oldest first; `next` is the `after` of the next page, null on the last."""

    items: list[AuditEntry]
    next: int | None


class AuditHead(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Label "audit"; sealed by the server key. Number and hash of the newest entry, 0 and zeros before the first."""

    seq: Annotated[int, Meta(ge=0)]
    hash: Digest
    time: float
