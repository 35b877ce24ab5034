"""The tables. Times are Unix seconds, digests SHA-256 in hexadecimal, ids 32 hexadecimal digits.

What a round has collected is in `answers`: one row per device and phase, so "who is in U2" is "who answered in phase
sharing". Nothing here holds an unmasked update, a private key or a usable token.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    and_,
    false,
    literal_column,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Id = String(32)
Digest = String(64)

LIVE = ("running", "paused")
"""The states of tasks whose rounds count."""
PHASES = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "updating")
"""The phases in which devices send something."""
UPDATE_PHASES = ("masking", "updating")
"""The phases whose answers are updates."""


class Base(DeclarativeBase):
    metadata = MetaData(
        # Migrations change and drop constraints by their names.
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Device(Base):
    """An enrolled device. `chain` is the JSON of messages.Chain, which its peers check for themselves.

    `device_key` is its newest key, the one at the end of the chain. A device that was `revoked` stays in the table, so
    that neither its token nor its keys can be used again.
    """

    __tablename__ = "devices"
    device_id: Mapped[str] = mapped_column(Id, primary_key=True)
    device_key: Mapped[bytes] = mapped_column(LargeBinary(32))
    token_key: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    population: Mapped[str] = mapped_column(String(128))
    kind: Mapped[str] = mapped_column(String(16))
    chain: Mapped[bytes] = mapped_column(LargeBinary)
    enrolled: Mapped[float] = mapped_column(Float)
    revoked: Mapped[float | None] = mapped_column(Float)
    # For pages of devices, of all populations and of one.
    __table_args__ = (Index(None, "enrolled", "device_id"), Index(None, "population", "enrolled", "device_id"))


class DeviceKey(Base):
    """Every key that any device has ever had. No key can be used a second time, by any device."""

    __tablename__ = "device_keys"
    device_key: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"))
    since: Mapped[float] = mapped_column(Float)


class RevokedToken(Base):
    """An enrolment token that nobody can enrol with any more. `token_id` is made of its public key."""

    __tablename__ = "revoked_tokens"
    token_id: Mapped[str] = mapped_column(Id, primary_key=True)
    token_key: Mapped[bytes] = mapped_column(LargeBinary(32))
    population: Mapped[str | None] = mapped_column(String(128))
    revoked: Mapped[float] = mapped_column(Float)


class CheckInRow(Base):
    """When a device was last seen waiting, when it is `due` to check in again, and the round it is assigned to.

    `due` is 0 in a round, until the device has checked in again after it, and for ever if the device was revoked.
    `versions` are the versions of each model that it fetched last, null if it does not report them. `neighbours`:
    whether it can take part in secure rounds over neighbours; `mlkem`: in those with ML-KEM; `adds_noise`: in rounds
    whose devices add noise; `aggregator`: it is an edge server.
    """

    __tablename__ = "check_ins"
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"), primary_key=True)
    population: Mapped[str] = mapped_column(String(128))
    last_seen: Mapped[float] = mapped_column(Float, index=True)
    due: Mapped[float] = mapped_column(Float, server_default="0")
    attributes: Mapped[dict[str, Any]] = mapped_column(JSON)
    # `none_as_null`: otherwise None would be the JSON text null, which IS NULL does not find.
    versions: Mapped[dict[str, int] | None] = mapped_column(JSON(none_as_null=True))
    neighbours: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    mlkem: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    adds_noise: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    aggregator: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    round_id: Mapped[str | None] = mapped_column(ForeignKey("rounds.round_id"), index=True)
    # For the search of devices that a round may take now.
    __table_args__ = (Index(None, "population", "due"),)


class UsedNonce(Base):
    """A nonce that a device has signed to open a session. It is kept until it expires, so that it is not used twice."""

    __tablename__ = "used_nonces"
    nonce: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    expires: Mapped[float] = mapped_column(Float, index=True)


class DeviceSession(Base):
    """A device's session: the SHA-256 of its bearer token."""

    __tablename__ = "sessions"
    token_hash: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"), index=True)
    expires: Mapped[float] = mapped_column(Float, index=True)


class Blob(Base):
    """A blob and its use: `bundle`, `weights`, `broadcast`, `revocations` or `state`; see server.rounds.reach.

    `deleted` is when retention gave it up, and `why`; `removed` when its file went after that (server.retention). The
    row stays. Rows of new blobs are made by server.storage.blob_rows alone.
    """

    __tablename__ = "blobs"
    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    # Part of the key: equal bytes may be of a kind that devices read and of one that is for the server alone.
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    created: Mapped[float] = mapped_column(Float)
    deleted: Mapped[float | None] = mapped_column(Float)
    removed: Mapped[float | None] = mapped_column(Float)
    why: Mapped[str] = mapped_column(String(256), server_default="")
    __table_args__ = (
        Index(
            # Only of files that are still to go.
            "ix_blobs_going",
            "digest",
            sqlite_where=text("deleted IS NOT NULL AND removed IS NULL"),
            postgresql_where=text("deleted IS NOT NULL AND removed IS NULL"),
        ),
    )


class BundleRow(Base):
    """`digest` is that of the manifest, `file_digest` that of the .bundle file among the blobs."""

    __tablename__ = "bundles"
    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    file_digest: Mapped[str] = mapped_column(Digest)
    name: Mapped[str] = mapped_column(String(256))
    size: Mapped[int] = mapped_column(BigInteger)
    strategy: Mapped[str] = mapped_column(String(128))
    manifest: Mapped[bytes] = mapped_column(LargeBinary)
    published: Mapped[float] = mapped_column(Float)


class Reach(Base):
    """A bundle (its manifest's digest) or a blob that a population may read. `reason` is a task's id, "model" for a
    version of one of its models, or "upload" for a bundle that was uploaded for it; see server.rounds.reach."""

    __tablename__ = "reaches"
    digest: Mapped[str] = mapped_column(Digest, primary_key=True)
    population: Mapped[str] = mapped_column(String(128), primary_key=True)
    reason: Mapped[str] = mapped_column(Id, primary_key=True)


class Task(Base):
    """What an operator asked for, and its progress. `model` and `strategy_state` are blobs, None before round 1;
    so is `rule_state`, what a robust rule keeps, None where it keeps nothing.

    `request` is the JSON of the checked tasks.TaskRequest (task_requests.request_of), with the server's defaults filled
    in. Fields that SQL conditions or every message of a device need have columns too. `failed_rounds` counts, since the
    last committed round, the failed ones that count against the task, and `spoiled_rounds` those whose sum was invalid
    (devices.spoiler_search). `request_digest` belongs to the idempotency key. A proposed task waits until somebody else
    than `created_by` approves it; both are names of the audit log. `evaluates` is the training's round whose
    version this evaluation is of (rounds.evaluating), else null. `plan_serial` is that of the last plan. A paused
    task finishes its round and opens no other. With a `salt` it takes only `percent` of the devices
    (devices.targeting). `root` is the device whose update its rule compares others with (devices.root_devices).
    Of a task of the upstream server `upstream` is the root's population, in whose weights log its weights are, and the
    `task_id` is the upstream's; of others it is null.
    """

    __tablename__ = "tasks"
    task_id: Mapped[str] = mapped_column(Id, primary_key=True)
    population: Mapped[str] = mapped_column(String(128))
    bundle: Mapped[str] = mapped_column(ForeignKey("bundles.digest"), index=True)
    weights: Mapped[str | None] = mapped_column(Digest)
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str] = mapped_column(String(1024))
    rounds_committed: Mapped[int] = mapped_column(Integer)
    failed_rounds: Mapped[int] = mapped_column(Integer)
    spoiled_rounds: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    request: Mapped[bytes] = mapped_column(LargeBinary, server_default="")
    kind: Mapped[str] = mapped_column(String(16), server_default="training")
    mode: Mapped[str] = mapped_column(String(20), server_default="semi-synchronous")
    privacy: Mapped[str] = mapped_column(String(16))
    cohort: Mapped[int] = mapped_column(Integer)
    concurrency: Mapped[int | None] = mapped_column(Integer)
    eligibility: Mapped[str] = mapped_column(String(1024), server_default="")
    salt: Mapped[str | None] = mapped_column(String(128))
    percent: Mapped[float | None] = mapped_column(Float)
    root: Mapped[str | None] = mapped_column(Id)
    upstream: Mapped[str | None] = mapped_column(String(128))
    request_digest: Mapped[str | None] = mapped_column(Digest)
    created_by: Mapped[str] = mapped_column(String(64), server_default="")
    approved_by: Mapped[str | None] = mapped_column(String(64))
    evaluates: Mapped[str | None] = mapped_column(Id, index=True)
    model: Mapped[str | None] = mapped_column(Digest)
    strategy_state: Mapped[str | None] = mapped_column(Digest)
    rule_state: Mapped[str | None] = mapped_column(Digest)
    plan_serial: Mapped[int] = mapped_column(BigInteger, server_default="0")
    created: Mapped[float] = mapped_column(Float)
    ended: Mapped[float | None] = mapped_column(Float)

    @property
    def live(self) -> bool:
        """Whether its rounds count."""
        return self.state in LIVE

    @property
    def buffered(self) -> bool:
        """Whether its rounds are buffers, which devices fill that began with any of the last versions (FedBuff)."""
        return self.mode == "asynchronous" and self.privacy == "plain"


class Round(Base):
    """One round; live while `ended` is None. `plan` is the JSON of the sealed messages.RoundPlan.

    `number` is that of the model version that the round makes, so a round that repeats a failed one has the same
    number. Rounds of an asynchronous task overlap; their number is one more than that of the version they began with.
    `sum_digest` names the checkpoint of the running sum in the spool, which has the answers whose `folded_into` is this
    round. `spoiled`: it failed because of what some device sent that is not known. `draw`: the probabilities with which
    devices were drawn (devices.spoiler_search). `settled`: since when the set of devices in the sum is fixed, and
    devices may know it. `step_norm` and `state_norm` are the L2 norms of what a training's round changed, `step_scale`
    is the factor that limited it (strategies.step_limits); null before the round is committed, and for other kinds of
    tasks. `complaints` is the number of excluded participants. `deadlines` are the seconds that each phase of this
    round may take (null: those of the task), `timings` what its devices took (server.rounds.durations), `phases` when
    each phase that it has begun began (null, or without some, of rounds that began before this was noted). Of a secure
    group: `part_of` is the id of the first group of the same round, `place` its number from 0 on, `group_sum` the
    digest of its unmasked sum in the spool (server.rounds.groups.grouping); of other rounds these are null.
    """

    __tablename__ = "rounds"
    round_id: Mapped[str] = mapped_column(Id, primary_key=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.task_id"), index=True)
    number: Mapped[int] = mapped_column(Integer)
    phase: Mapped[str] = mapped_column(String(16))
    phase_ends: Mapped[float] = mapped_column(Float)
    phases: Mapped[dict[str, float] | None] = mapped_column(JSON(none_as_null=True))
    reason: Mapped[str] = mapped_column(String(1024))
    plan: Mapped[bytes] = mapped_column(LargeBinary)
    plan_digest: Mapped[str] = mapped_column(Digest)
    update_bytes: Mapped[int] = mapped_column(BigInteger)
    weights_in: Mapped[str] = mapped_column(Digest)
    weights_out: Mapped[str | None] = mapped_column(Digest)
    weight_sum: Mapped[float | None] = mapped_column(Float)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    sum_digest: Mapped[str | None] = mapped_column(Digest)
    spoiled: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    draw: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    settled: Mapped[float | None] = mapped_column(Float)
    step_norm: Mapped[float | None] = mapped_column(Float)
    state_norm: Mapped[float | None] = mapped_column(Float)
    step_scale: Mapped[float | None] = mapped_column(Float)
    complaints: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    deadlines: Mapped[dict[str, float] | None] = mapped_column(JSON(none_as_null=True))
    timings: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    part_of: Mapped[str | None] = mapped_column(Id, index=True)
    place: Mapped[int | None] = mapped_column(Integer)
    group_sum: Mapped[str | None] = mapped_column(Digest)
    started: Mapped[float] = mapped_column(Float)
    ended: Mapped[float | None] = mapped_column(Float)
    __table_args__ = (
        Index(
            # Only of live rounds: the coordinator asks for them in every step, and the ended ones only grow in number.
            "ix_rounds_live",
            "round_id",
            sqlite_where=text("ended IS NULL"),
            postgresql_where=text("ended IS NULL"),
        ),
    )


class Participant(Base):
    """A device that was assigned to a round.

    `ends`: when its seat in a buffered round is given up, else null. The others are times, or null: `left`, when it
    said that it will send nothing; `counted`, when that was counted as a refusal; `excluded`, when a complaint put it
    out of the round, or too few neighbours held its shares."""

    __tablename__ = "participants"
    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.round_id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"), primary_key=True, index=True)
    ends: Mapped[float | None] = mapped_column(Float)
    left: Mapped[float | None] = mapped_column(Float)
    counted: Mapped[float | None] = mapped_column(Float)
    excluded: Mapped[float | None] = mapped_column(Float)


class Refusal(Base):
    """How many devices left a round before their first message, for one reason (messages.LeaveReason, or untold)."""

    __tablename__ = "refusals"
    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.round_id"), primary_key=True)
    reason: Mapped[str] = mapped_column(String(16), primary_key=True)
    devices: Mapped[int] = mapped_column(Integer)


class Answer(Base):
    """What a device sent in a phase. `digest` and `size` (bytes) are those of the request's body.

    `body` is None if it is stored elsewhere (shares in their table, updates in the spool), and after the round.
    `folded_into` is the round whose running sum has the update: its own, or the one whose buffer it went into.
    `fetched`: how many bytes the device was sent since its answer before (devices.fetched); null: not counted.
    """

    __tablename__ = "answers"
    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.round_id"), primary_key=True)
    phase: Mapped[str] = mapped_column(String(16), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"), primary_key=True)
    digest: Mapped[str] = mapped_column(Digest)
    size: Mapped[int] = mapped_column(BigInteger)
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    received: Mapped[float] = mapped_column(Float)
    fetched: Mapped[int | None] = mapped_column(BigInteger)
    folded_into: Mapped[str | None] = mapped_column(Id, index=True)

    @classmethod
    def of(cls, round_id: Any, device_id: Any) -> ColumnElement[bool]:
        """The condition for everything that a device sent in a round. All phases are named because the primary key has
        the phase before the device: without them the database would read every answer of the round."""
        phases = cls.phase.in_([literal_column(f"'{phase}'") for phase in PHASES])
        return and_(cls.round_id == round_id, phases, cls.device_id == device_id)


class Share(Base):
    """An encrypted secret share, signed by `sender`, on its way to `recipient`; deleted when the round ends."""

    __tablename__ = "shares"
    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.round_id"), primary_key=True)
    recipient: Mapped[str] = mapped_column(Id, primary_key=True)
    sender: Mapped[str] = mapped_column(Id, primary_key=True)
    ciphertext: Mapped[bytes] = mapped_column(LargeBinary(512))
    signature: Mapped[bytes] = mapped_column(LargeBinary(64), server_default="")
    # SQLite then stores the rows in the order of their key, so that a recipient's shares lie together.
    __table_args__ = {"sqlite_with_rowid": False}


class Version(Base):
    """A version of a training task's model, and its origin. Version 0 has the bundle's own parameters."""

    __tablename__ = "versions"
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.task_id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    weights: Mapped[str] = mapped_column(Digest, index=True)
    strategy_state: Mapped[str | None] = mapped_column(Digest, index=True)
    parent: Mapped[str | None] = mapped_column(Digest)
    # Unique: no round can make two versions, whatever a coordinator does.
    round_id: Mapped[str | None] = mapped_column(ForeignKey("rounds.round_id"), unique=True)
    cohort: Mapped[int] = mapped_column(Integer)
    weight_sum: Mapped[float | None] = mapped_column(Float)
    created: Mapped[float] = mapped_column(Float)


class WeightsEntry(Base):
    """One entry of a weights log; see archipel.server.rounds.weights_log. `statement` is the JSON of the sealed
    messages.WeightsStatement, `hash` that of its body, `evidence` the JSON of a messages.Endorsement (null: none)."""

    __tablename__ = "weights_log"
    population: Mapped[str] = mapped_column(String(128), primary_key=True)
    bundle: Mapped[str] = mapped_column(ForeignKey("bundles.digest"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(16))
    weights: Mapped[str] = mapped_column(Digest)
    hash: Mapped[str] = mapped_column(Digest)
    statement: Mapped[bytes] = mapped_column(LargeBinary)
    evidence: Mapped[bytes | None] = mapped_column(LargeBinary)
    __table_args__ = (Index(None, "population", "bundle", "weights"),)
