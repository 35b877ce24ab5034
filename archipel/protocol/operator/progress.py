"""How a task's rounds go: which round, how far its devices are, what its sum says, and where the model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from archipel.protocol.messages import DeviceId, Digest, Kind, Message, Name, Phase, RoundId
from archipel.protocol.operator.results import Distribution
from archipel.protocol.operator.tasks import FaultInfo, Mode, Privacy, TaskState

MOST_ROUNDS = 50
"""So many ended rounds are told of at most in one answer."""
MOST_MISSING = 20
"""So many missing devices of a round are told of one by one."""
DONE: Mapping[str, str] = {
    "assigning": "assigned",
    "advertising": "advertised",
    "sharing": "shared",
    "complaining": "opened",
    "masking": "masked",
    "confirming": "confirmed",
    "unmasking": "unmasked",
    "updating": "updated",
    "buffering": "buffered",
    "aggregating": "aggregated",
}
"""What a device has done that answered in a phase, in one word, as docs/protocol.md calls the messages."""

Outcome = Literal["running", "committed", "failed", "spoiled"]


class ProgressQuery(Message, frozen=True, kw_only=True):
    """`rounds`: of how many of the rounds that ended last the answer tells, beside those that run."""

    rounds: Annotated[int, Meta(ge=0, le=MOST_ROUNDS)] = 10


class PhaseProgress(Message, frozen=True, kw_only=True, omit_defaults=False):
    """One phase of a round, as a step of its funnel: `answered` devices of `expected` have sent what belongs to it.

    Phase assigning: so many devices were assigned; before they are, so many wait of those that the round begins with.
    Both numbers are null where no device sends anything, and in phase assigning where they would tell what devices
    report (the server's `smallest_answer`). `began` is in Unix seconds, `seconds` is how long the phase took, or has
    taken so far; both are null of rounds from before the server noted them. `bytes_up` is the size of the answers,
    `bytes_down` what the server sent to the devices that answered, since their answer before (null: it did not count).
    """

    phase: Phase
    began: float | None
    seconds: float | None
    expected: int | None
    answered: int | None
    bytes_up: int
    bytes_down: int | None


class MissingDevice(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A device that has not sent what the round's last phase with devices asks for. `furthest` is the last phase in
    which it answered, `answered` when (Unix seconds; null: it sent nothing, or it goes by a pseudonym). `in_sum`: its
    update is in the sum all the same, since it stopped after that. `reason` says in words why it is missing."""

    device_id: DeviceId
    furthest: Phase
    answered: float | None
    bytes_up: int
    in_sum: bool
    reason: str


class RoundProgress(Message, frozen=True, kw_only=True, omit_defaults=False):
    """One round. `number`, `part_of`, `phase`, `phase_ends`, `reason`, `faults`, `set_aside`, `refused`, `weights_out`,
    `started` and `ended` are as in RoundInfo.

    `seconds` is how long the round took, or has taken so far. `phases` are those that it has begun, in their order;
    `needed` is how many answers the present phase needs at its deadline (null where it waits for none). `in_sum` counts
    the devices whose updates are in the sum (null: not settled yet). `missing` counts the devices that have not sent
    what the last phase asks for, of which `missing_devices` are the first; `left` said that they send nothing, and
    `excluded` were put out of the round. `metrics` and `distributions` are those of the sum, and of a training's
    version those of its evaluation, by names that say so, such as `evaluation accuracy`; `clamped` and `clipped` are as
    in RoundResult. `evaluation_state` is the state of that evaluation's task (null: there is none).
    """

    round_id: RoundId
    number: int
    part_of: RoundId | None
    outcome: Outcome
    phase: Phase
    phase_ends: float
    needed: int | None
    reason: str
    phases: list[PhaseProgress]
    assigned: int
    in_sum: int | None
    left: int
    excluded: int
    missing: int
    missing_devices: list[MissingDevice]
    faults: list[FaultInfo]
    set_aside: list[DeviceId]
    refused: dict[str, int]
    bytes_up: int
    bytes_down: int | None
    metrics: dict[str, float]
    distributions: dict[str, Distribution]
    clamped: dict[str, float]
    clipped: int | None
    evaluation_state: TaskState | None
    weights_out: Digest | None
    started: float
    ended: float | None
    seconds: float


class RegisteredVersion(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A version of a model in the registry; `promoted`: it is the one for all devices."""

    model: Name
    version: int
    promoted: bool


class ModelPlace(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Where a training's newest model is: `GET` of `path` gives the weights, of `bytes` bytes. `number` is that of the
    round that made them (0: they are those that the task began with). `deleted` is when retention deleted them (Unix
    seconds), `registered` the versions of models that have these weights of this task."""

    weights: Digest
    number: int
    path: str
    bytes: int | None
    deleted: float | None
    registered: list[RegisteredVersion]


class TaskProgress(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How a task's rounds go. `now` is the server's time (Unix seconds), from which every other one is to be counted.

    `running` are the rounds under way, oldest first; `newest` those that ended last, newest first. `model` is where a
    training's model is, null for other kinds and until the first round was opened. The other fields are as in TaskInfo.
    """

    task_id: RoundId
    name: Name
    population: Name
    kind: Kind
    privacy: Privacy
    mode: Mode
    state: TaskState
    reason: str
    rounds: int
    rounds_committed: int
    failed_rounds: int
    spoiled_rounds: int
    waiting_for: str
    under_way: str
    last_failure: str
    search: str
    running: list[RoundProgress]
    newest: list[RoundProgress]
    model: ModelPlace | None
    created: float
    ended: float | None
    now: float


class RoundLog(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`lines` of the server's log that are about a round, oldest first."""

    lines: list[str]
