"""The table of the upstream's rounds that an edge server takes part in."""

from __future__ import annotations

from typing import Literal

from sqlalchemy import Float, ForeignKey, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from archipel.server.database.tables import Base, Digest, Id

SiteState = Literal["wanted", "open", "summed", "counted", "given_up"]


class SiteRound(Base):
    """One round of the upstream server, and the one round of this server's own devices that serves it.

    `round_id` is the upstream's, `plan` the JSON of its plan as it was sealed, `local_round` the own round. `state`:
    the sum is `wanted`; the own round is `open`; it is `summed`, and its `sum_digest` in the spool, of so many
    `devices`; the upstream has `counted` it; or it was `given_up`, at whatever point before. The own round ends after
    that, and is committed if the upstream counted it. `sum_by`: until when (Unix seconds) the sum is of use.
    """

    __tablename__ = "site_rounds"
    round_id: Mapped[str] = mapped_column(Id, primary_key=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.task_id"), index=True)
    plan: Mapped[bytes] = mapped_column(LargeBinary)
    state: Mapped[str] = mapped_column(String(16), index=True)
    local_round: Mapped[str | None] = mapped_column(Id, unique=True)
    sum_digest: Mapped[str | None] = mapped_column(Digest)
    devices: Mapped[int | None] = mapped_column(Integer)
    sum_by: Mapped[float] = mapped_column(Float)
    created: Mapped[float] = mapped_column(Float)
