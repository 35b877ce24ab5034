"""Pages of a table, by the time and id of the row that the last page ended with: new rows never shift them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql import ColumnExpressionArgument

from archipel.protocol.operator.tasks import PageQuery
from archipel.server.database.tables import Base
from archipel.server.http.problems import refuse

R = TypeVar("R", bound=Base)
K = TypeVar("K", str, int)


def page(
    session: Session,
    table: type[R],
    time: InstrumentedAttribute[float],
    key: InstrumentedAttribute[str],
    query: PageQuery,
    *where: ColumnExpressionArgument[bool],
    chosen: Sequence[ColumnExpressionArgument[bool]] = (),
    newest_first: bool = False,
) -> tuple[Sequence[R], str | None]:
    """The rows of one page and the `after` of the next. Raises ApiError 404 where `query.after` is no row's key.

    `where` are the rows that the caller may see, `chosen` those among them that it asks for: the last page may have
    ended with one that is not among these any more.
    """
    place: Any = tuple_(time, key)
    rows = select(table).where(*where, *chosen)
    if query.after is not None:
        last = session.execute(select(time, key).where(key == query.after, *where)).one_or_none()
        if last is None:
            raise refuse(404, f"after: no {query.after}")
        there = tuple_(*last)
        rows = rows.where(place < there if newest_first else place > there)
    order = (time.desc(), key.desc()) if newest_first else (time, key)
    found = session.scalars(rows.order_by(*order).limit(query.limit + 1)).all()
    shown = found[: query.limit]
    return shown, str(getattr(shown[-1], key.key)) if len(found) > len(shown) else None


def page_by(
    session: Session,
    table: type[R],
    key: InstrumentedAttribute[K],
    limit: int,
    after: K | None,
    *where: ColumnExpressionArgument[bool],
    newest_first: bool = False,
) -> tuple[Sequence[R], K | None]:
    """The rows of one page in the order of `key`, which is unique among them, and the `after` of the next."""
    rows = select(table).where(*where)
    if after is not None:
        rows = rows.where(key < after if newest_first else key > after)
    found = session.scalars(rows.order_by(key.desc() if newest_first else key).limit(limit + 1)).all()
    shown = found[:limit]
    return shown, getattr(shown[-1], key.key) if len(found) > len(shown) else None
