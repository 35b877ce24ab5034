"""From a check-in to a round: plans, offers of versions, who is revoked, and how a round stands."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.bundle.validation import MAX_LEVELS, MAX_SITE
from archipel.protocol.messages.base import (
    MAX_COHORT,
    MAX_MODELS,
    MAX_REVOKED,
    DeviceId,
    Digest,
    Message,
    Metrics,
    Name,
    RoundId,
    VersionNumber,
    Whole,
)
from archipel.protocol.messages.distributions import Distributions
from archipel.protocol.sealed import Sealed

Phase = Literal[
    "assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "buffering", "updating",
    "aggregating", "committed", "failed",
]  # fmt: skip
Kind = Literal["training", "evaluation", "analytics"]
Protocol = Literal["complete", "neighbours", "neighbours-mlkem"]
"""Of secure rounds: over the complete graph of a cohort (protocol.secagg), or over few neighbours of each device
(protocol.secagg_plus), with keys by X25519 alone or by ML-KEM-768 as well."""


def over_neighbours(protocol: Protocol | None) -> bool:
    """Whether rounds of the protocol are over few neighbours of each device; None is that of plain rounds."""
    return protocol in ("neighbours", "neighbours-mlkem")


class ServerNoise(Message, frozen=True, kw_only=True):
    """What the server says that it adds to a round's sum, and what everything costs that it has released of the model
    up to this round, with the round, in all tasks: (`epsilon`, `delta`)-differential privacy of everything that a
    device ever gave. `multiplier`: the standard deviation over the most by which one device changes the sum."""

    mechanism: Literal["central", "correlated"]
    multiplier: Annotated[float, Meta(gt=0, le=1e9)]
    epsilon: Annotated[float, Meta(ge=0, le=1e30)]
    delta: Annotated[float, Meta(gt=0, lt=1)]


MOST_NOISE = 1 << 24
"""Up to this, samples of noise are drawn many at once (lite_runtime.many_samples)."""


class NoiseShare(Message, frozen=True, kw_only=True):
    """What each device of a training's round does to its changes: it makes `steps` whole steps of their clip, and adds
    discrete Gaussian noise of a standard deviation of `deviation` steps to each entry (protocol.noised)."""

    deviation: Annotated[int, Meta(ge=1, le=MOST_NOISE)]
    steps: Annotated[int, Meta(ge=1, le=MOST_NOISE)]


class RoundPlan(Message, frozen=True, kw_only=True):
    """Label "plan"; sealed by the server key. The agent refuses it when outside the bundle's privacy policy.

    `threshold` of secret sharing and `cohort` bounds are counts of devices, and so is `colluders`: so many of the
    cohort may work with the server and still learn nothing but the sum. `modulus_bits` is b of the masks modulo 2^b;
    `weights` is the digest of the parameters (safetensors) to start from; `broadcast` likewise, if there is any.

    `kind` says what is uploaded: of training what `finish` gives, of evaluation the `metrics` (each with the range of
    its fixed-point encoding) weighted by at most `max_examples` examples, of analytics what `program` gives. In an
    asynchronous task a device multiplies its deltas by (1 + s)^-staleness_exponent, where s is RoundStatus.staleness.
    In a `buffered` round what was taken counts for whatever version comes next. Of an evaluation or analysis
    `min_contributors` is how many devices with examples must be in the sum for it to be released. With `count_adoption`
    a secure evaluation also counts the devices that have decided about the version which it evaluates, and sums their
    noisy answers whether they took it (see client.memory.decisions). In an evaluation each device also counts itself,
    for each metric of `distributions`, in the bin of its own value. In a `narrow` round a masked entry takes as many
    bits as its own sum needs (protocol.narrow), in others as many whole bytes as the widest.

    `serial` grows with every round of the task, and after `not_after` (Unix seconds) the plan is good no longer: a
    device takes part in a round once. `number` is that of the version that the round makes, and says nothing of that.
    With protocol `neighbours` or `neighbours-mlkem` each device shares its secrets with so many others, of whose shares
    `threshold` give a secret, and masks with the first `partners` of them.
    With `noise` devices send their clipped changes alone, without metrics, and add noise to them before they mask.
    `revocations` is the digest of the list (a Sealed Revocations, as JSON) of those who must not be in the cohort, None
    where there is nobody. `server_noise` is the server's word, which no device can check.

    With `levels` of edge servers below the one that made the plan (0: none) its members are edge servers. Each sends
    the sum of up to `site` devices, and how many they are, which it makes in a round of its own, whose plan has one
    level less. All plans below the root's have that as their `origin`, as the root sealed it. `min_contributors` then
    holds for the devices of each site.
    """

    round_id: RoundId
    task_id: RoundId
    number: Whole
    bundle: Digest
    weights: Digest
    privacy: Literal["secure", "plain"]
    min_cohort: Annotated[int, Meta(ge=1, le=MAX_COHORT)]
    max_cohort: Annotated[int, Meta(ge=1, le=MAX_COHORT)]
    threshold: Annotated[int, Meta(ge=1, le=MAX_COHORT)]
    modulus_bits: Annotated[int, Meta(ge=8, le=32)]
    hyperparameters: dict[str, float] = {}
    broadcast: Digest | None = None
    kind: Kind = "training"
    program: Annotated[str, Meta(max_length=128)] = ""
    metrics: Metrics = {}
    max_examples: Annotated[int, Meta(ge=1, le=1 << 30)] = 1000
    staleness_exponent: Annotated[float, Meta(ge=0, le=16)] | None = None
    buffered: bool = False
    colluders: Annotated[int, Meta(ge=0, lt=MAX_COHORT)] = 0
    min_contributors: Annotated[int, Meta(ge=0, le=MAX_COHORT)] = 0
    count_adoption: bool = False
    distributions: Distributions = {}
    narrow: bool = False
    serial: Whole = 0
    not_after: Whole = 0
    revocations: Digest | None = None
    protocol: Protocol = "complete"
    neighbours: Annotated[int, Meta(ge=0, lt=MAX_COHORT)] = 0
    partners: Annotated[int, Meta(ge=0, lt=MAX_COHORT)] = 0
    server_noise: ServerNoise | None = None
    noise: NoiseShare | None = None
    levels: Annotated[int, Meta(ge=0, le=MAX_LEVELS)] = 0
    site: Annotated[int, Meta(ge=1, le=MAX_SITE)] = 1
    origin: Sealed | None = None


class Revocations(Message, frozen=True, kw_only=True):
    """Label "revocations"; sealed by the server key: ids of revoked devices of `population`, and of revoked enrolment
    tokens. `epoch` is the number of revocations so far; neither it nor the list ever shrinks."""

    population: Name
    epoch: Whole
    devices: Annotated[list[DeviceId], Meta(max_length=MAX_REVOKED)]
    tokens: Annotated[list[RoundId], Meta(max_length=MAX_REVOKED)]


LeaveReason = Literal[
    "cohort", "kind", "pace", "population", "privacy", "publisher", "size", "policy", "bundle", "data", "diverged",
    "other",
]  # fmt: skip
"""Why a device takes no part: a limit of its owner (privacy: a plain round, or an epsilon; pace: rounds a day; size:
bytes to fetch, store or send), a plan outside the publisher's policy, a damaged bundle, examples that do not fit it
(data), or a loss that was no finite number (diverged). There is no free text, which could reveal something about the
device's data."""


class LeaveRequest(Message, frozen=True, kw_only=True):
    """`reason` is missing where the owner does not want the server to know it."""

    reason: LeaveReason | None = None


class CheckIn(Message, frozen=True, kw_only=True):
    """`attributes` are those that the owner chose to report. `versions` are the models that the device was offered,
    each with the number of the version that it fetched last, whether it runs that or not. With `versions`, even empty
    ones, the device asks for offers; with null it wants none. `protocols` are the secure rounds that it speaks, and
    `adds_noise` says whether it can add noise to its vector itself. So many seconds (`wait`) the server may keep its
    answer back, until the device is in a round."""

    attributes: dict[str, str | float | bool] = {}
    versions: Annotated[dict[Name, VersionNumber], Meta(max_length=MAX_MODELS)] | None = None
    protocols: Annotated[tuple[Protocol, ...], Meta(min_length=1, max_length=3)] = ("complete",)
    adds_noise: bool = False
    wait: Annotated[float, Meta(ge=0, le=300)] = 0.0


class SetAside(Message, frozen=True, kw_only=True):
    """No round takes the device before `until` (Unix seconds), or until an operator releases it; `reason` says why."""

    until: float
    reason: Annotated[str, Meta(max_length=1024)]


class CheckInResponse(Message, frozen=True, kw_only=True):
    """With a `plan` the device is assigned to a round; else it checks in again after `retry_after` seconds. `set_aside`
    is there while no round takes the device.

    `offers` (label "offer") are for a device that sent its `versions`: one for each model of which it should run
    another version than it fetched last.
    """

    plan: Sealed | None = None
    retry_after: float = 1.0
    set_aside: SetAside | None = None
    offers: Annotated[list[Sealed], Meta(max_length=MAX_MODELS)] = []


class Offer(Message, frozen=True, kw_only=True):
    """Label "offer"; sealed by the server key: the version of `model` that devices of `population` are to run.

    `weights` is the digest of its parameters (safetensors), None for those in the bundle. `rollout` is there while a
    rollout offers the version to a part of the devices. `serial` grows with every change of the population's offers: a
    device that has seen a greater one knows that this offer is old.
    """

    population: Name
    model: Name
    version: VersionNumber
    bundle: Digest
    weights: Digest | None = None
    rollout: RoundId | None = None
    serial: Whole


class RoundStatus(Message, frozen=True, kw_only=True):
    """`phase_ends` is when the phase's deadline passes, Unix seconds by the server's clock; `staleness` the number of
    versions that an asynchronous task has made since this round's model; `complaints` the number of accused devices,
    from phase masking on: with 0 there is no list to fetch. Ask again after `retry_after` seconds.

    Example:
        print(client.rounds.status(round_id).phase)  # committed
    """

    round_id: RoundId
    phase: Phase
    phase_ends: float
    retry_after: float
    reason: str = ""
    staleness: Whole = 0
    complaints: Annotated[int, Meta(ge=0, le=MAX_COHORT)] = 0


class RoundTask(Message, frozen=True, kw_only=True):
    """The task of a round, as its members may know it: `rounds` are those that it asks for, `committed` those that have
    made a version. Why a task failed may tell what devices said, which is for operators."""

    task_id: RoundId
    state: Literal["running", "paused", "completed", "cancelled", "failed"]
    rounds: Annotated[int, Meta(ge=1, le=1_000_000)]
    committed: Whole
