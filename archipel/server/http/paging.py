"""Pages of a table. A page begins after the row that the last page ended with, so new rows never shift it."""

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
    """The rows of one page, ordered by `time` and `key`, and the `after` of the next page (None: it is the last one).

    `where` selects the rows that the caller may see, `chosen` those of them that it asks for. Raises ApiError 404 if
    `query.after` is not the key of a row that the caller may see.
    """
    # Rows with equal times are ordered by their keys; the comparison of pairs continues exactly there.
    place: Any = tuple_(time, key)
    rows = select(table).where(*where, *chosen)
    if query.starts is not None:
        # A range, which the index of the key finds; "g" follows the last hexadecimal digit.
        rows = rows.where(key >= query.starts, key < query.starts + "g")
    if query.after is not None:
        # Without `chosen`: the last row of the page before may have left that choice in the meantime.
        last = session.execute(select(time, key).where(key == query.after, *where)).one_or_none()
        if last is None:
            raise refuse(404, f"after: no {query.after}")
        last_place = tuple_(*last)
        rows = rows.where(place < last_place if newest_first else place > last_place)
    order = (time.desc(), key.desc()) if newest_first else (time, key)
    # One row more than the page shows tells whether there is a next page.
    fetched = session.scalars(rows.order_by(*order).limit(query.limit + 1)).all()
    shown = fetched[: query.limit]
    return shown, str(getattr(shown[-1], key.key)) if len(fetched) > len(shown) else None


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
    fetched = session.scalars(rows.order_by(key.desc() if newest_first else key).limit(limit + 1)).all()
    shown = fetched[:limit]
    return shown, getattr(shown[-1], key.key) if len(fetched) > len(shown) else None
