"""The tables of the model registry: models, their versions, the history of promotions, and rollouts."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, ForeignKey, ForeignKeyConstraint, Index, Integer, LargeBinary, String, text
from sqlalchemy import UniqueConstraint as Unique
from sqlalchemy.orm import Mapped, mapped_column

from archipel.server.database.tables import Base, Digest, Id

Name = String(128)


class Model(Base):
    """A model of a population, in numbered versions. `promoted` is the number of the version for all devices,
    `promotion` that of the entry in `promotions` which made it so; both are null before the first promotion.
    `keep_versions` and `keep_days` stand in place of the server's settings of these names; null: the settings hold."""

    __tablename__ = "models"
    name: Mapped[str] = mapped_column(Name, primary_key=True)
    population: Mapped[str] = mapped_column(Name, index=True)
    promoted: Mapped[int | None] = mapped_column(Integer)
    promotion: Mapped[int | None] = mapped_column(Integer)
    keep_versions: Mapped[int | None] = mapped_column(Integer)
    keep_days: Mapped[float | None] = mapped_column(Float)
    created: Mapped[float] = mapped_column(Float)


class ModelVersion(Base):
    """One content of a model: a bundle, and the weights to be used with it (null: the bundle's own).

    `digest` is of both. `parent` is the number of the version that it was made from. `task_id` and `task_version` name
    its row of `versions` if it comes from training. A version that is `rejected` (Unix seconds) cannot be promoted.
    """

    __tablename__ = "model_versions"
    model: Mapped[str] = mapped_column(ForeignKey("models.name"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(Digest)
    bundle: Mapped[str] = mapped_column(ForeignKey("bundles.digest"))
    weights: Mapped[str | None] = mapped_column(Digest, index=True)
    parent: Mapped[int | None] = mapped_column(Integer)
    task_id: Mapped[str | None] = mapped_column(Id)
    task_version: Mapped[int | None] = mapped_column(Integer)
    rejected: Mapped[float | None] = mapped_column(Float)
    reason: Mapped[str] = mapped_column(String(1024))
    created: Mapped[float] = mapped_column(Float)
    __table_args__ = (
        # The same content is one version, even if two requests register it at the same moment.
        Unique("model", "digest"),
        ForeignKeyConstraint(["task_id", "task_version"], ["versions.task_id", "versions.number"]),
    )


class Promotion(Base):
    """One entry of a model's history of promotions: from `created` on `version` is for all devices.

    `below` is the number of the entry to which a rollback returns, so rolling back twice goes back two promotions.
    `request_id` and `request_digest` belong to the request and its idempotency key.
    """

    __tablename__ = "promotions"
    model: Mapped[str] = mapped_column(ForeignKey("models.name"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(Integer)
    below: Mapped[int | None] = mapped_column(Integer)
    how: Mapped[str] = mapped_column(String(16))
    rollout_id: Mapped[str | None] = mapped_column(ForeignKey("rollouts.rollout_id"))
    actor: Mapped[str] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(Id, unique=True)
    request_digest: Mapped[str | None] = mapped_column(Digest)
    created: Mapped[float] = mapped_column(Float)


class Rollout(Base):
    """The rollout of a version, live while `ended` is None; see archipel.server.registry.rollouts.

    `request` is the JSON of the checked RolloutRequest. `stage` counts from 1. The version is offered to `percent` of
    the devices for which `eligibility` is true, chosen by a hash with the key `salt`. While the rollout is paused,
    `resumes` is the state to continue in, and `left` the seconds that were left of it. `created_by` is the name of the
    audit log.
    """

    __tablename__ = "rollouts"
    rollout_id: Mapped[str] = mapped_column(Id, primary_key=True)
    model: Mapped[str] = mapped_column(ForeignKey("models.name"), index=True)
    population: Mapped[str] = mapped_column(Name)
    version: Mapped[int] = mapped_column(Integer)
    baseline: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16))
    state_ends: Mapped[float] = mapped_column(Float)
    resumes: Mapped[str | None] = mapped_column(String(16))
    left: Mapped[float | None] = mapped_column(Float)
    stage: Mapped[int] = mapped_column(Integer)
    percent: Mapped[float] = mapped_column(Float)
    eligibility: Mapped[str] = mapped_column(String(1024))
    salt: Mapped[str] = mapped_column(String(128))
    request: Mapped[bytes] = mapped_column(LargeBinary)
    request_digest: Mapped[str | None] = mapped_column(Digest)
    reason: Mapped[str] = mapped_column(String(1024))
    created_by: Mapped[str] = mapped_column(String(64), server_default="")
    created: Mapped[float] = mapped_column(Float)
    ended: Mapped[float | None] = mapped_column(Float)
    __table_args__ = (
        Index(
            # Unique: at most one rollout of a model is live, even if two requests begin one at the same moment.
            "ix_rollouts_live",
            "model",
            unique=True,
            sqlite_where=text("ended IS NULL"),
            postgresql_where=text("ended IS NULL"),
        ),
    )


class RolloutStage(Base):
    """A stage that was begun, and the evaluation tasks at its end. `passed` is null until there is a verdict."""

    __tablename__ = "rollout_stages"
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.rollout_id"), primary_key=True)
    stage: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    started: Mapped[float] = mapped_column(Float)
    candidate_task: Mapped[str | None] = mapped_column(ForeignKey("tasks.task_id"))
    baseline_task: Mapped[str | None] = mapped_column(ForeignKey("tasks.task_id"))
    passed: Mapped[bool | None]
    ended: Mapped[float | None] = mapped_column(Float)


class OfferSerial(Base):
    """A number that grows whenever the offers for a population's devices change. No row: there was no offer yet."""

    __tablename__ = "offer_serials"
    population: Mapped[str] = mapped_column(Name, primary_key=True)
    serial: Mapped[int] = mapped_column(BigInteger)
