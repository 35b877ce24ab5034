"""Messages of the API about models, their versions, rollouts and metrics."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from archipel.protocol.eligibility import MAX_CHARACTERS
from archipel.protocol.messages import Digest, Message, Name, RoundId, VersionNumber
from archipel.protocol.operator.differential_privacy import PrivacySpent
from archipel.protocol.operator.results import Distribution, RoundResult
from archipel.protocol.operator.tasks import MAX_PAGE, Count, PageQuery, Privacy, TaskState

VersionState = Literal["registered", "candidate", "promoted", "rejected"]
How = Literal["promote", "rollback", "rollout"]
RolloutState = Literal["soaking", "evaluating", "paused", "completed", "rolled_back"]
MAX_STAGES: Final = 20
MAX_EVALUATIONS: Final = 100
MAX_SECONDS: Final = 31 * 86400.0
Reason = Annotated[str, Meta(max_length=512)]


class NameQuery(Message, frozen=True, kw_only=True):
    """At most `limit` items, from the one that follows `after` by name."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: Name | None = None


class NumberQuery(Message, frozen=True, kw_only=True):
    """At most `limit` items, from the one that follows number `after` in the list."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: VersionNumber | None = None


class ModelRequest(Message, frozen=True, kw_only=True):
    """A model that the devices of `population` are to run. No other model of the server has the same `name`."""

    name: Name
    population: Name


class ModelInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`promoted` is the number of the version that is for all devices, `newest` that of the last registered one,
    `rollout_id` the rollout under way; each null where there is none. `not_offered` says why the server offers the
    promoted version to no device, such as an expired bundle; it is empty while the server offers it. `keep_versions`
    and `keep_days` are the model's own retention rule (RetentionRequest). `created` is in Unix seconds.

    Example:
        found = client.models.get("digits")
        print(found.promoted, found.newest, found.not_offered or "is offered")  # 1 2 is offered
    """

    name: Name
    population: Name
    promoted: int | None
    newest: int | None
    rollout_id: RoundId | None
    not_offered: str
    keep_versions: int | None
    keep_days: float | None
    created: float


class RetentionRequest(Message, frozen=True, kw_only=True):
    """Which weights of the model's versions are kept: those of the newest `keep_versions` (0: of all) and of the last
    `keep_days` days, beside everything that is in use. Null: as the server's setting of that name says."""

    keep_versions: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    keep_days: Annotated[float, Meta(ge=0, le=36_500)] | None = None


class ModelPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """By name; `next` is the `after` of the next page, null on the last."""

    items: list[ModelInfo]
    next: Name | None


class VersionRequest(Message, frozen=True, kw_only=True):
    """Either an uploaded `bundle` as it is, or version `task_version` (null: the newest) of the training task
    `task_id`. `parent` is the number of the version that it was made from; null: as the lineage says.

    Example:
        VersionRequest(bundle=old.digest)
    """

    bundle: Digest | None = None
    task_id: RoundId | None = None
    task_version: Annotated[int, Meta(ge=0, le=1_000_000_000)] | None = None
    parent: VersionNumber | None = None


class VersionInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A version: its content, and where it came from.

    `digest` is SHA-256 of the JSON of `bundle` and `weights` (keys sorted, no blanks; null: the bundle's own), so the
    same content is the same version. Round `round_id` made version `task_version` of task `task_id` from the updates of
    `cohort` devices. The last three fields are from the bundle's lineage: the bundle that it was made from, the recipe,
    and the metrics measured then. `downloaded`: so many devices reported within the last 30 days that they fetched this
    version last; they do not report whether they run it. After `not_after` (Unix seconds; 0: without end) the bundle
    has expired, and the server offers the version to no device. `weights_deleted` is when retention has deleted the
    weights (Unix seconds; null: they are there), `deleted_why` by which rule.

    Example:
        for each in client.models.versions("digits"):
            print(each.number, each.state, each.task_id, each.downloaded, "devices")
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
    weights_deleted: float | None
    deleted_why: str
    created: float
    bundle_parent: Digest | None
    recipe: list[str]
    bundle_metrics: dict[str, float]


class Evaluation(Message, frozen=True, kw_only=True, omit_defaults=False):
    """The result of one round of an evaluation task: means of `metrics` over `examples` examples, `distributions` over
    the devices, and the shares that were `clamped` (see RoundResult). `ended` is in Unix seconds.

    Example: see `archipel.operator.VersionDetail`.
    """

    task_id: RoundId
    round_id: RoundId
    devices: int
    examples: float
    metrics: dict[str, float]
    distributions: dict[str, Distribution]
    clamped: dict[str, float]
    ended: float


class VersionDetail(VersionInfo, frozen=True, kw_only=True, omit_defaults=False):
    """A version with its `evaluations` on devices of the model's population, newest first, at most 100. Of a version
    that rounds with the server's noise made, or a bundle that was made from one, `privacy_spent` is what it and all
    versions before it cost a device.

    Example:
        version = client.models.version("digits", 1)
        print([(each.metrics["mse"], each.devices) for each in version.evaluations])
    """

    evaluations: list[Evaluation]
    privacy_spent: PrivacySpent | None


class VersionPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[VersionInfo]
    next: int | None


class PromotionRequest(Message, frozen=True, kw_only=True):
    version: VersionNumber


class RejectionRequest(Message, frozen=True, kw_only=True):
    reason: Reason


class PromotionInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """From `created` (Unix seconds) on `version` is for all devices: promoted by hand, at the end of a rollout, or by a
    rollback.

    Example:
        for each in client.models.promotions("digits"):
            print(each.version, each.created)
    """

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
    """The server offers the version to `percent` of the devices for `soak_seconds`, then evaluates it on them.

    Example:
        Stage(percent=10, soak_seconds=3600)
    """

    percent: Annotated[float, Meta(gt=0, le=100)]
    soak_seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)]


class Gate(Message, frozen=True, kw_only=True):
    """The condition that an evaluation on a stage's devices must meet for the rollout to go on.

    `metric` is one that an evaluation of the bundles can ask for, `range` the bound of its absolute value: a value
    beyond it on any device fails the gate. With `max_loss` the server also evaluates the promoted version afterwards,
    on those of the same devices that still come, and the new version may be worse by at most so much. With `worst` the
    new version's value must not be worse than that. At least one of the two must be given. The server asks at most
    `max_devices`, and at least `min_devices` must answer (with privacy secure also the share of `max_devices` that the
    threshold of the bundle's policy demands). Together they must have `min_examples`; at most `max_examples` count of
    each. Without a result within `seconds` the server rolls the rollout back.

    Example:
        Gate(metric="accuracy", range=1.0, better="higher", min_devices=20, max_devices=100)
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
    """Offer `version` of `model` to more and more devices, and to all of them after the last of `stages`.

    `eligibility` is an expression over the attributes that devices report (docs/tasks.md, "Whom a task takes"):
    the percentages are of the devices for which it is true. `gate` "none": no gate between the stages.

    Example:
        stages = [Stage(percent=5, soak_seconds=3600), Stage(percent=100, soak_seconds=0)]
        RolloutRequest(model="digits", version=2, stages=stages, gate="none")
    """

    model: Name
    version: VersionNumber
    stages: Annotated[list[Stage], Meta(min_length=1, max_length=MAX_STAGES)]
    gate: Gate | Literal["none"]
    eligibility: Annotated[str, Meta(max_length=MAX_CHARACTERS)] = ""


class StageEvaluation(Message, frozen=True, kw_only=True, omit_defaults=False):
    """The evaluation of `version` at the end of a stage; `value` is the gate's metric, null without a result.

    Example: see `archipel.operator.RolloutInfo`.
    """

    version: int
    task_id: RoundId
    state: TaskState
    devices: int | None
    examples: float | None
    value: float | None


class StageInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`started` (Unix seconds, as `ended`) is null before the stage has begun, `passed` until the gate has decided.

    Example: see `archipel.operator.RolloutInfo`.
    """

    percent: float
    soak_seconds: float
    started: float | None = None
    ended: float | None = None
    passed: bool | None = None
    candidate: StageEvaluation | None = None
    baseline: StageEvaluation | None = None


class RolloutInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`stage` counts from 1; `state_ends` is when the state's time is over: then a stage is evaluated, and an
    evaluation without a result or a pause ends in a rollback. `waiting_for` says what it waits for (empty once it has
    ended; where it has an eligibility also for auditors). `baseline` is the version that was promoted when the rollout
    began. Times are in Unix seconds.

    Example:
        rollout = client.rollouts.get(rollout_id)
        print(rollout.state, rollout.stage, "of", len(rollout.stages))  # soaking 1 of 1
        for stage in rollout.stages:
            print(stage.percent, stage.passed, stage.candidate.value if stage.candidate else "not evaluated")
    """

    rollout_id: RoundId
    model: Name
    population: Name
    version: int
    baseline: int
    state: RolloutState
    state_ends: float
    reason: str
    waiting_for: str
    stage: int
    stages: list[StageInfo]
    eligibility: str
    gate: Gate | Literal["none"]
    created: float
    ended: float | None


class RolloutQuery(PageQuery, frozen=True, kw_only=True):
    """A page of rollouts; with `model` those of this model alone."""

    model: Name | None = None


class RolloutPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[RolloutInfo]
    next: RoundId | None


class RoundMetrics(Message, frozen=True, kw_only=True, omit_defaults=False):
    """The outcome of a committed round with `devices` devices: the `result`, and of training the new weights
    `weights_out` and the sum of the devices' weights.

    `metrics` are for curves: the means of the result, and of a training those of the evaluation of its new version, by
    names that say of what: `training loss`, `evaluation loss`, and so are `distributions` over devices. `clip` is the
    bound of the norm of an update where the server adapts it. `evaluation` is the task that evaluates the version
    (`evaluate_every`), `evaluation_state` its state. `weights_deleted` is when retention has deleted the new weights.
    Times are in Unix seconds.

    Example:
        for each in client.tasks.metrics(evaluation_id):
            print(each.number, each.devices, "devices", each.metrics, each.ended - each.started, "seconds")
    """

    round_id: RoundId
    number: int
    devices: int
    weight_sum: float | None
    step_norm: float | None
    step_scale: float | None
    clip: float | None
    weights_out: Digest | None
    weights_deleted: float | None
    result: RoundResult | None
    metrics: dict[str, float]
    distributions: dict[str, Distribution]
    evaluation: RoundId | None
    evaluation_state: TaskState | None
    started: float
    ended: float


class MetricsPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Oldest first, or as was asked for; `next` is the `after` of the next page, null on the last."""

    items: list[RoundMetrics]
    next: RoundId | None
