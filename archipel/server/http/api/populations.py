"""Populations: the names under which devices are enrolled and for which tasks are made, with numbers about each."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Select, func, select, union
from sqlalchemy.orm import Session

from archipel.protocol.operator.devices import PopulationInfo, PopulationPage, PopulationQuery, SearchInfo
from archipel.server.callers import Identity
from archipel.server.database.fault_tables import Quarantine, Search, Suspect
from archipel.server.database.tables import LIVE, CheckInRow, Device, Task
from archipel.server.http.problems import refuse
from archipel.server.http.routes import READ, Call, Route
from archipel.server.rounds.candidates import is_waiting

_Counted = type[Device] | type[CheckInRow] | type[Task] | type[Quarantine] | type[Suspect]


def list_populations(call: Call[None]) -> PopulationPage:
    """Populations by name."""
    limit = call.query.limit
    with call.services.database.read() as session:
        # One more than the page shows tells whether there is a next page.
        names = session.scalars(_names(call.identity, after=call.query.after).limit(limit + 1)).all()
        shown = names[:limit]
        items = _count(session, shown, now=call.services.clock(), window=call.services.settings.check_in_window)
    return PopulationPage(items=items, next=shown[-1] if len(names) > limit else None)


def show_population(call: Call[None], name: str) -> PopulationInfo:
    """One population."""
    call.identity.require(name)
    with call.services.database.read() as session:
        if session.scalar(_names(call.identity, name=name)) is None:
            raise refuse(404, f"no device is enrolled in a population {name!r}, and no task was made for it")
        now, window = call.services.clock(), call.services.settings.check_in_window
        return _count(session, [name], now=now, window=window)[0]


def _names(identity: Identity, *, after: str | None = None, name: str | None = None) -> Select[str]:
    # Populations have no table of their own: a name is known once a device or a task has it.
    known = union(select(Device.population), select(Task.population)).subquery()
    names = select(known.c.population).where(*identity.visible(known.c.population)).order_by(known.c.population)
    if after is not None:
        names = names.where(known.c.population > after)
    return names if name is None else names.where(known.c.population == name)


def _count(session: Session, names: Sequence[str], *, now: float, window: float) -> list[PopulationInfo]:
    def tally(table: _Counted, *where: ColumnElement[bool]) -> dict[str, int]:
        query = select(table.population, func.count()).where(table.population.in_(names), *where)
        return {row[0]: row[1] for row in session.execute(query.group_by(table.population))}

    enrolled = tally(Device, Device.revoked.is_(None))
    revoked = tally(Device, Device.revoked.is_not(None))
    in_rounds = tally(CheckInRow, CheckInRow.round_id.is_not(None))
    waiting = tally(CheckInRow, *is_waiting(now, window))
    tasks = tally(Task, Task.state.in_(LIVE))
    set_aside = tally(Quarantine, Quarantine.until > now)
    searches = {row.population: row for row in session.scalars(select(Search).where(Search.population.in_(names)))}
    # Only a search has suspects, and mostly there is none.
    suspects = tally(Suspect) if searches else {}
    return [
        PopulationInfo(
            name=name,
            enrolled=enrolled.get(name, 0),
            revoked=revoked.get(name, 0),
            waiting=waiting.get(name, 0),
            in_rounds=in_rounds.get(name, 0),
            set_aside=set_aside.get(name, 0),
            live_tasks=tasks.get(name, 0),
            search=_search(searches.get(name), suspects.get(name, 0)),
        )
        for name in names
    ]


def _search(row: Search | None, suspects: int) -> SearchInfo | None:
    if row is None:
        return None
    return SearchInfo(
        began=row.began,
        last_spoiled=row.last_spoiled,
        rounds=row.rounds,
        spoiled=row.spoiled,
        quiet=row.quiet,
        suspects=suspects,
    )


ROUTES = (
    Route("GET", "/v1/populations", READ, list_populations, response=PopulationPage, query=PopulationQuery),
    Route("GET", "/v1/populations/<name:name>", READ, show_population, response=PopulationInfo),
)
