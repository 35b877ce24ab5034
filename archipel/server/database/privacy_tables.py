"""The ledger of differential privacy."""

from __future__ import annotations

from sqlalchemy import Float, ForeignKey, Index, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from archipel.server.database.tables import Base


class PrivacyEvent(Base):
    """Something that was done with the data of a population's devices, charged before it was done.

    `event` is the JSON of one event (archipel.privacy.events), as a list. `model` is the name of the bundle, so that
    all bundles of that name share an account. Of a round that is aggregated again after a kill there are several rows,
    because each attempt draws noise of its own. With correlated noise a round has one row, and `noise` is the digest of
    the file with its noise (server.rounds.kept_noise). Rows are never changed and never deleted.
    """

    __tablename__ = "privacy_events"
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    population: Mapped[str] = mapped_column(String(128))
    model: Mapped[str] = mapped_column(String(256))
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.task_id"))
    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.round_id"), index=True)
    event: Mapped[bytes] = mapped_column(LargeBinary)
    charged: Mapped[float] = mapped_column(Float)
    noise: Mapped[str | None] = mapped_column(String(64))
    __table_args__ = (Index(None, "population", "model"),)
