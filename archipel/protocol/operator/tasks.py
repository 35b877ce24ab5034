"""Messages of the operator's side of the API; those of the devices' side are in archipel.protocol.messages."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.bundle.validation import MAX_LEVELS, MAX_SITE
from archipel.protocol.eligibility import MAX_CHARACTERS
from archipel.protocol.messages import (
    MAX_COHORT,
    Bins,
    DeviceId,
    Digest,
    Key,
    Kind,
    Message,
    MetricName,
    Metrics,
    Name,
    Phase,
    Protocol,
    RoundId,
    Whole,
)
from archipel.protocol.operator.aggregation import Aggregation
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy, PrivacySpent
from archipel.protocol.operator.results import RoundResult

Count = Annotated[int, Meta(ge=1, le=MAX_COHORT)]
MAX_PAGE = 500
IDEMPOTENCY_HEADER = "Idempotency-Key"
Deadline = Annotated[float, Meta(gt=0, le=86400)]
TaskState = Literal["proposed", "running", "paused", "completed", "cancelled", "failed"]
Mode = Literal["synchronous", "semi-synchronous", "asynchronous"]
Privacy = Literal["secure", "plain"]
DeadlinePhase = Literal[
    "assigning",
    "advertising",
    "sharing",
    "complaining",
    "masking",
    "confirming",
    "unmasking",
    "buffering",
    "updating",
    "aggregating",
]


class PageQuery(Message, frozen=True, kw_only=True):
    """At most `limit` items, from the one that follows the item with the id `after`; with `starts` those alone whose id
    begins with these hexadecimal digits."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: RoundId | None = None
    starts: Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")] | None = None


class BundleQuery(PageQuery, frozen=True, kw_only=True):
    """A page of bundles."""

    after: Digest | None = None


class TaskQuery(PageQuery, frozen=True, kw_only=True):
    """A page of tasks; with `population`, `state` or `kind` those alone, with `since` (Unix seconds) those created from
    then on."""

    population: Name | None = None
    state: TaskState | None = None
    kind: Kind | None = None
    since: Annotated[float, Meta(ge=0, le=1e11)] | None = None


class ResultQuery(PageQuery, frozen=True, kw_only=True):
    """A page of a task's rounds or results, oldest first; with `newest_first` the other way round."""

    newest_first: bool = False


class EntryQuery(Message, frozen=True, kw_only=True):
    """Entries that follow number `after`; 0: from the first one on."""

    after: Whole = 0


class Health(Message, frozen=True, kw_only=True):
    """The answer of a server that works.

    Example:
        print(client.server.health().status)  # ok
    """

    status: Literal["ok"]
    version: str


class Alive(Message, frozen=True, kw_only=True):
    """The process answers."""

    status: Literal["alive"]


class Ready(Message, frozen=True, kw_only=True):
    """The server can do its work."""

    status: Literal["ready"]


class ServerInfo(Message, frozen=True, kw_only=True):
    """The server's public key and the key that certifies enrolment tokens (raw Ed25519, 32 bytes each).

    Example:
        server_key = client.server.info().server_key
    """

    server_key: Key
    enrolment_key: Key
    version: str


class BundleInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`digest` is the SHA-256 of manifest.json, `bytes` the size of the .bundle file, `published` the Unix time of its
    first upload.

    Example:
        bundle = client.bundles.upload("linear.bundle", "pupils")
        print(bundle.name, bundle.strategy, bundle.bytes, "bytes")
    """

    digest: Digest
    name: str
    bytes: int
    strategy: str
    published: float


class BundlePage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[BundleInfo]
    next: Digest | None


class TaskRequest(Message, frozen=True, kw_only=True):
    """Have `bundle` trained, evaluated or analysed over `population`, for `rounds` rounds.

    `cohort` devices are assigned to each round; `threshold` is that of secret sharing (null: the smallest that the
    bundle's privacy policy allows). A round takes no more updates once `goal` of them are in; a cohort above it is
    over-selection against devices that drop out. `deadlines` are in seconds. `hyperparameters` go to the devices or to
    the strategy.

    `mode`: a synchronous round needs `goal` updates (or the whole cohort's) by its deadline, a semi-synchronous one
    `min_cohort` of them. An asynchronous task makes a version of every `cohort` updates, from up to `concurrency`
    devices at work at once (null: twice the cohort); updates count (1 + s)^-`staleness_exponent`, where s is the number
    of versions made meanwhile, and not at all above `max_staleness`. With privacy secure each such cohort is a round of
    its own.

    `kind` evaluation takes the means of `metrics` (name: bound of its absolute value) over all examples, at most
    `max_examples` of each device, with the weights `weights` (null: the bundle's own). What a bundle's `evaluate` sums
    up is asked for as the mean, and its `correct` as `accuracy`. Analytics sums what the bundle's `program` computes.
    Both are queries: nothing is released of fewer than `min_contributors` devices with examples (null: as many as the
    bundle's privacy policy asks for, which is the least), see docs/queries.md. `count_adoption`: a secure
    evaluation also estimates how many devices took the version that it evaluates when they were offered it. Of
    `distributions`, metrics with their bins ("default": up to the bound in `metrics`), it also says how they are spread
    over the devices, of which it then needs at least 10 with examples.

    `evaluate_every` n of a training: after every n-th committed round devices of the same population evaluate the new
    version, as in a task of kind evaluation with this request's `metrics` (none: those of the training, with their
    ranges), `distributions`, `max_examples` and `min_contributors`; `cohort`, `min_cohort`, `privacy`, `eligibility`
    and deadlines are those of the training. Each is a query, and the next round waits for it. `evaluation_noise`: noise
    on the result of each, as in `differential_privacy` of a task of kind evaluation, with its `noise_multiplier` given;
    the training's own multiplier, where the server chooses it, leaves room for all of them.

    `aggregation` of a training is how the updates of a round become one: a robust rule needs privacy plain,
    or secure groups (docs/robust.md). Rule `fltrust` needs privacy plain and a device of the population as its `root`,
    which is in each round beside the cohort. `secure_groups` g of a secure, semi-synchronous training divides the
    cohort of each round into g groups (0: none). Each is a secure round of its own, of at least `min_cohort` devices
    and with its own `threshold`, and the rule goes over the groups' means.

    `protocol` of a secure task: over the complete graph of a cohort, or over few neighbours of each device, whose
    number and threshold follow from what the bundle's privacy policy says of colluders, dropouts and the server, also
    with keys that resist quantum computers (null: the server chooses by the cohort, see docs/protocol.md).

    `differential_privacy`: noise on each round's sum, of the server or of the devices, and what the model
    may cost a device in all its tasks (docs/privacy.md). Metrics of a training have none, and are then kept back.

    `levels` of a secure training or evaluation: between this server and the devices are so many levels of edge servers,
    and its members are those of the first (0: devices). `cohort`, `min_cohort`, `goal` and `threshold` count edge
    servers, each of which sends the sum of up to `site` devices (null: as many as the bundle's privacy policy allows).
    `min_contributors` counts devices, and holds in each of these sums, see docs/edge.md.

    `eligibility` is an expression over the attributes that devices report (docs/tasks.md, "Whom a task takes"). A
    device gives at most `max_contributions` updates, and rests for `rest_seconds` from the start of a round that it was
    in. With `devices_of` only devices are taken whose updates are in the sum of that round, which is committed.

    Example:
        request = TaskRequest(name="digits", population="pupils", bundle=old.digest, rounds=9, min_cohort=15, cohort=16)
    """

    name: Name
    population: Name
    bundle: Digest
    rounds: Annotated[int, Meta(ge=1, le=1_000_000)]
    min_cohort: Count
    cohort: Count
    privacy: Privacy = "secure"
    kind: Kind = "training"
    mode: Mode = "semi-synchronous"
    threshold: Count | None = None
    min_contributors: Count | None = None
    goal: Count | None = None
    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_staleness: Annotated[int, Meta(ge=0, le=1_000_000)] = 20
    staleness_exponent: Annotated[float, Meta(ge=0, le=16)] = 0.5
    program: Annotated[str, Meta(max_length=128)] = ""
    weights: Digest | None = None
    metrics: Metrics = {}
    distributions: Annotated[dict[MetricName, Bins | Literal["default"]], Meta(max_length=16)] = {}
    max_examples: Annotated[int, Meta(ge=1, le=1 << 30)] = 1000
    count_adoption: bool = False
    evaluate_every: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    evaluation_noise: DifferentialPrivacy = DifferentialPrivacy()
    eligibility: Annotated[str, Meta(max_length=MAX_CHARACTERS)] = ""
    max_contributions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    rest_seconds: Annotated[float, Meta(ge=0, le=31_536_000)] = 0.0
    devices_of: RoundId | None = None
    hyperparameters: dict[str, float] = {}
    aggregation: Aggregation = Aggregation()
    secure_groups: Annotated[int, Meta(ge=0, le=MAX_COHORT)] = 0
    protocol: Protocol | None = None
    differential_privacy: DifferentialPrivacy = DifferentialPrivacy()
    levels: Annotated[int, Meta(ge=0, le=MAX_LEVELS)] = 0
    site: Annotated[int, Meta(ge=1, le=MAX_SITE)] | None = None
    deadlines: dict[DeadlinePhase, Deadline] = {}


class TaskInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`model` is the digest of the newest weights (null until the first round was opened), `waiting` the number of
    devices that are checking in and may be taken now, `waiting_for` why no round is under way although the task runs
    (which devices it lacks; empty where it lacks none), `under_way` what its round waits for, `last_failure` why its
    last round failed and what the devices said that left it (empty if it did not fail). Where the task has an
    eligibility, `waiting` is rounded down to a multiple of the server's `smallest_answer`, and null below it and for
    auditors. `percent`: so many of the eligible devices are taken at all, in the evaluations that rollouts make; null:
    all of them. `failed_rounds` are those since the last committed one that count towards the end of the task,
    `spoiled_rounds` those since then that some device spoiled that is not known yet; `search` says what is being done
    about it (empty: nothing is wrong). Who asked for it is in `created_by`, such as "operator:ID", and who approved of
    it in `approved_by`: a query that is `proposed` waits for that. `refused`: how often devices took no part in a
    round, by reason (LeaveReason, or "untold"). `evaluates` is the training's round whose version this task evaluates,
    where that training's `evaluate_every` made it. `upstream`: the upstream server gave this task, and its
    rounds serve those of that server. `privacy_spent`, where the server adds noise: what the versions of its model have
    cost each device so far, in all tasks of the population together. `hints`, while the task can run: what its settings
    make likely to go wrong, with what would help. `weights_deleted` is when retention has deleted
    the weights `model`, which only happens once the task has ended. Times are in Unix seconds, `rest_seconds` and
    `deadlines` in seconds.

    Example:
        task = client.tasks.get(task_id)
        print(task.state, task.rounds_committed, "of", task.rounds, "rounds")  # completed 1 of 1 rounds
        weights = client.weights.read(task.model)
    """

    task_id: RoundId
    name: Name
    population: Name
    bundle: Digest
    state: TaskState
    reason: str
    rounds: int
    rounds_committed: int
    failed_rounds: int
    spoiled_rounds: int
    privacy: Privacy
    kind: Kind
    mode: Mode
    min_cohort: int
    cohort: int
    threshold: int
    min_contributors: int | None
    goal: int | None
    concurrency: int | None
    max_staleness: int
    staleness_exponent: float
    program: str
    weights: Digest | None
    metrics: dict[str, float]
    distributions: dict[str, Bins | Literal["default"]]
    max_examples: int
    count_adoption: bool
    evaluate_every: int | None
    evaluation_noise: DifferentialPrivacy
    evaluates: RoundId | None
    eligibility: str
    percent: float | None
    max_contributions: int | None
    rest_seconds: float
    devices_of: RoundId | None
    hyperparameters: dict[str, float]
    aggregation: Aggregation
    secure_groups: int
    protocol: Protocol | None
    differential_privacy: DifferentialPrivacy
    privacy_spent: PrivacySpent | None
    hints: list[str]
    levels: int
    site: int | None
    upstream: bool
    deadlines: dict[str, float]
    model: Digest | None
    weights_deleted: float | None
    waiting: int | None
    waiting_for: str
    under_way: str
    last_failure: str
    search: str
    created_by: str
    approved_by: str | None
    refused: dict[str, int]
    created: float
    ended: float | None


class TaskPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[TaskInfo]
    next: RoundId | None


class ParticipantInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`furthest` is the last phase in which the device answered; `assigning`: it has sent nothing since it got the
    plan, except that it `left`, if it did. `bytes_uploaded`: the size of its update.

    Example:
        for each in client.rounds.get(round_id).participants:
            print(each.device_id, each.furthest, each.bytes_uploaded, "bytes")
    """

    device_id: DeviceId
    furthest: Phase
    left: bool
    bytes_uploaded: int


class FaultInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Something that a device did wrong in a round, clearly by its own fault.

    Example: see `archipel.operator.RoundInfo`.
    """

    device_id: DeviceId
    reason: str


class RoundInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`participants` are the devices that got their plan in this round, `survivors` those whose updates are in the sum,
    which that of a `root` device never is.
    In an asynchronous and plain task these may have got their plan in another round. `weight_sum` is the sum of their
    weights.

    `part_of`, of a secure group: the id of the first group of its round, all of which have the same `number`; null for
    other rounds. The version that they make, its result and its weight sum are in the first of those whose sums are in
    it.

    `number` is that of the model version which the round makes (in an asynchronous task: after which it began); a round
    that repeats a failed one has the same. `spoiled`: the round failed because of an update, and nobody can see whose.
    `faults` are those that are clearly one device's, `set_aside` the devices that no round takes because of evidence
    from this one. `suspects`: so many of the waiting devices were drawn with another probability than the others.
    `result` has the numbers of the sum (see RoundResult), null for a training whose bundle has no metrics. `refused`:
    how many devices took no part, by reason (LeaveReason, or "untold"). Of a training's committed round: `step_norm`,
    the L2 norm of the change of the parameters, and `step_scale`, 1 or the factor by which the server shortened a step
    that was far longer than the task's others (`reason` says so). `deadlines`: the seconds that its phases may take,
    where these follow what the population's devices took and not the task. Times are in Unix seconds.

    Example:
        for each in client.tasks.rounds(task_id):
            print(each.number, each.phase, len(each.survivors), "devices")  # 1 committed 3 devices
            print(each.ended - each.started, "seconds", [(fault.device_id, fault.reason) for fault in each.faults])
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
    spoiled: bool
    faults: list[FaultInfo]
    set_aside: list[DeviceId]
    suspects: int
    step_norm: float | None
    step_scale: float | None
    result: RoundResult | None
    refused: dict[str, int]
    deadlines: dict[str, float]
    part_of: RoundId | None
    started: float
    ended: float | None


class RoundPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Oldest first, or as was asked for; `next` is the `after` of the next page, null on the last."""

    items: list[RoundInfo]
    next: RoundId | None
