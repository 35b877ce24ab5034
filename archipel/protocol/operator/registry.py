"""What the API speaks about models, their versions, rollouts and metrics."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from archipel.protocol.eligibility import MAX_CHARACTERS
from archipel.protocol.messages import Digest, Message, Name, RoundId, VersionNumber
from archipel.protocol.operator.tasks import MAX_PAGE, Count, Privacy, RoundResult, TaskState

VersionState = Literal["registered", "candidate", "promoted", "rejected"]
How = Literal["promote", "rollback", "rollout"]
RolloutState = Literal["soaking", "evaluating", "paused", "completed", "rolled_back"]
MAX_STAGES: Final = 20
MAX_EVALUATIONS: Final = 100
MAX_SECONDS: Final = 31 * 86400.0
Reason = Annotated[str, Meta(max_length=512)]


class NameQuery(Message, frozen=True, kw_only=True):
    """At most `limit` items, those that follow the one named `after`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: Name | None = None


class NumberQuery(Message, frozen=True, kw_only=True):
    """At most `limit` items, those that follow the one with the number `after`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: VersionNumber | None = None


class ModelRequest(Message, frozen=True, kw_only=True):
    """What the devices of `population` are to run under this name, which is one of the whole server."""

    name: Name
    population: Name


class ModelInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`promoted` is the number of the version that is for all devices, `newest` that of the last one registered,
    `rollout_id` the rollout under way; each null where there is none. `not_offered` says why the promoted version is
    offered to no device: its bundle has expired; empty while it is offered."""

    name: Name
    population: Name
    promoted: int | None
    newest: int | None
    rollout_id: RoundId | None
    not_offered: str
    created: float


class ModelPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """By name; `next` is the `after` of the next page, null on the last."""

    items: list[ModelInfo]
    next: Name | None


class VersionRequest(Message, frozen=True, kw_only=True):
    """Either an uploaded `bundle` as it is, or what the training task `task_id` made: version `task_version` of it
    (null: its newest). `parent` is the number of the version that it was made from; null: as the lineage says."""

    bundle: Digest | None = None
    task_id: RoundId | None = None
    task_version: Annotated[int, Meta(ge=0, le=1_000_000_000)] | None = None
    parent: VersionNumber | None = None


class VersionInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A version: its content, and where it came from.

    `digest` is SHA-256 of the JSON of `bundle` and `weights` (keys sorted, no blanks; null: the bundle's own), so the
    same content is the same version. Version `task_version` of task `task_id` was made by round `round_id` from the
    updates of `cohort` devices. The last three are what the bundle says of itself: the bundle that it was made of, the
    recipe, and what was measured then. `downloaded`: so many devices said within
    the last 30 days that this is what they fetched last; whether they run it, none says. After
    `not_after` (Unix seconds; 0: without end) its bundle has expired, and the version is offered to no device.
    """

    model: Name
    number: int
    digest: Digest
    state: VersionState
    reason: str
    bundle: Digest
    weights: Digest | None
    parent: int | None
    task_id: RoundId | None
    task_version: int | None
    round_id: RoundId | None
    cohort: int | None
    downloaded: int | None
    not_after: int
    created: float
    bundle_parent: Digest | None
    recipe: list[str]
    bundle_metrics: dict[str, float]


class Evaluation(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What the devices of one round of an evaluation task found: means of `metrics` over `examples` examples, and what
    was `clamped` (see RoundResult)."""

    task_id: RoundId
    round_id: RoundId
    devices: int
    examples: float
    metrics: dict[str, float]
    clamped: dict[str, float]
    ended: float


class VersionDetail(VersionInfo, frozen=True, kw_only=True, omit_defaults=False):
    """With its `evaluations` over devices of the model's population, newest first, at most 100."""

    evaluations: list[Evaluation]


class VersionPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[VersionInfo]
    next: int | None


class PromotionRequest(Message, frozen=True, kw_only=True):
    version: VersionNumber


class RejectionRequest(Message, frozen=True, kw_only=True):
    reason: Reason


class PromotionInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """From `created` on `version` was for all devices: promoted by hand, at the end of a rollout, or by a rollback."""

    number: int
    version: int
    how: How
    rollout_id: RoundId | None
    actor: str
    created: float


class PromotionPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[PromotionInfo]
    next: int | None


class Stage(Message, frozen=True, kw_only=True):
    """`percent` of the devices are offered the version for `soak_seconds` before it is evaluated on them."""

    percent: Annotated[float, Meta(gt=0, le=100)]
    soak_seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)]


class Gate(Message, frozen=True, kw_only=True):
    """What a stage's devices must find for the rollout to go on.

    `metric` is one that an evaluation of the bundles can ask for, `range` the bound of its absolute value: beyond that
    on any device the gate is not passed. With `max_loss` the version now promoted is evaluated after it, on those of
    the same devices that still come, and the new one may be worse by so much; with `worst` its value is compared with
    that. At least one of the two is there. At least `min_devices` are heard, at most `max_devices` asked (with privacy
    secure at least the threshold of these that the bundle's policy demands), and they must have `min_examples`
    together, of which `max_examples` are taken from each. Without a result within `seconds` the rollout is rolled back.
    """

    metric: Annotated[str, Meta(min_length=1, max_length=128)]
    range: Annotated[float, Meta(gt=0, le=1e30)]
    better: Literal["higher", "lower"]
    min_devices: Count
    max_devices: Count
    max_loss: Annotated[float, Meta(ge=0, le=1e30)] | None = None
    worst: Annotated[float, Meta(ge=-1e30, le=1e30)] | None = None
    privacy: Privacy = "secure"
    min_examples: Annotated[int, Meta(ge=1, le=1 << 40)] = 1
    max_examples: Annotated[int, Meta(ge=1, le=1 << 30)] = 1000
    program: Annotated[str, Meta(max_length=128)] = ""
    seconds: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] = 3600.0


class RolloutRequest(Message, frozen=True, kw_only=True):
    """Bring `version` of `model` to more and more devices, and to all of them after the last of `stages`.

    `eligibility` is an expression over the attributes that devices report (docs/operations.md, "Whom a task takes"):
    the percentages are of the devices for which it is true. That there is no `gate` between the stages has to be said:
    "none".
    """

    model: Name
    version: VersionNumber
    stages: Annotated[list[Stage], Meta(min_length=1, max_length=MAX_STAGES)]
    gate: Gate | Literal["none"]
    eligibility: Annotated[str, Meta(max_length=MAX_CHARACTERS)] = ""


class StageEvaluation(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How the evaluation of `version` at the end of a stage goes; `value` is the gate's metric, null without one."""

    version: int
    task_id: RoundId
    state: TaskState
    devices: int | None
    examples: float | None
    value: float | None


class StageInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`started` is null before it has begun, `passed` until there is a verdict."""

    percent: float
    soak_seconds: float
    started: float | None = None
    ended: float | None = None
    passed: bool | None = None
    candidate: StageEvaluation | None = None
    baseline: StageEvaluation | None = None


class RolloutInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`stage` counts from 1; `state_ends` is when the state's time is over: a stage is then evaluated, an evaluation
    without a result or a pause then ends in a rollback. `baseline` is the version that was promoted when it began."""

    rollout_id: RoundId
    model: Name
    population: Name
    version: int
    baseline: int
    state: RolloutState
    state_ends: float
    reason: str
    stage: int
    stages: list[StageInfo]
    eligibility: str
    gate: Gate | Literal["none"]
    created: float
    ended: float | None


class RolloutPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[RolloutInfo]
    next: RoundId | None


class RoundMetrics(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What the `devices` devices of a committed round came to: of training the version `weights_out` and the sum of
    their weights, else the `result`."""

    round_id: RoundId
    number: int
    devices: int
    weight_sum: float | None
    step_norm: float | None
    step_scale: float | None
    weights_out: Digest | None
    result: RoundResult | None
    started: float
    ended: float


class MetricsPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Oldest first; `next` is the `after` of the next page, null on the last."""

    items: list[RoundMetrics]
    next: RoundId | None
