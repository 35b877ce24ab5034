"""The tables of faults, of devices that are set aside or rest, and of searches for devices that spoil rounds."""

from __future__ import annotations

from sqlalchemy import JSON, Float, ForeignKey, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from archipel.server.database.tables import Base, Digest

Population = String(128)
Reason = String(128)


class Fault(Base):
    """Something wrong that a device sent in a round, and that nobody else can have sent; one row for each reason."""

    __tablename__ = "faults"
    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.round_id"), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"), primary_key=True)
    reason: Mapped[str] = mapped_column(Reason, primary_key=True)
    noted: Mapped[float] = mapped_column(Float)
    __table_args__ = (Index(None, "device_id", "noted"),)


class Quarantine(Base):
    """A device that no round takes before `until`. The row stays, because `times` says how often it was set aside.

    `detail` is the evidence in words, `round_id` the round after which it was enough. `released`: when an operator
    ended the quarantine, else null. Faults from before its end do not count again.
    """

    __tablename__ = "quarantines"
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"), primary_key=True)
    population: Mapped[str] = mapped_column(Population)
    reason: Mapped[str] = mapped_column(Reason)
    detail: Mapped[str] = mapped_column(String(512))
    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.round_id"), index=True)
    since: Mapped[float] = mapped_column(Float)
    until: Mapped[float] = mapped_column(Float)
    times: Mapped[int] = mapped_column(Integer)
    released: Mapped[float | None] = mapped_column(Float)
    __table_args__ = (Index(None, "population", "until"),)


class Search(Base):
    """The search for devices that spoil a population's rounds. It ends when no round was spoiled for a long time.

    `rounds` and `spoiled` count the rounds that it learned from, `quiet` the good ones since the last spoiled one.
    `absent`: the bets (archipel.server.devices.suspicion) of a device that was in no spoiled round so far.
    """

    __tablename__ = "searches"
    population: Mapped[str] = mapped_column(Population, primary_key=True)
    began: Mapped[float] = mapped_column(Float)
    last_spoiled: Mapped[float] = mapped_column(Float)
    rounds: Mapped[int] = mapped_column(Integer)
    spoiled: Mapped[int] = mapped_column(Integer)
    quiet: Mapped[int] = mapped_column(Integer)
    absent: Mapped[list[float]] = mapped_column(JSON)


class Suspect(Base):
    """The score of a device that was in a spoiled round: its bets, and the numbers of rounds that it was in."""

    __tablename__ = "suspects"
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"), primary_key=True)
    population: Mapped[str] = mapped_column(ForeignKey("searches.population"), index=True)
    logs: Mapped[list[float]] = mapped_column(JSON)
    rounds: Mapped[int] = mapped_column(Integer)
    spoiled: Mapped[int] = mapped_column(Integer)


class Rest(Base):
    """A device that left rounds with `bundle` of tasks of this `kind`, `times` in a row: such rounds take it again from
    `until` on, and from `soonest` on where they have too few other devices. Why it left is not in it, and does not
    follow from it (archipel.server.devices.rests)."""

    __tablename__ = "rests"
    bundle: Mapped[str] = mapped_column(Digest, ForeignKey("bundles.digest"), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"), primary_key=True)
    times: Mapped[int] = mapped_column(Integer)
    soonest: Mapped[float] = mapped_column(Float)
    until: Mapped[float] = mapped_column(Float, index=True)
