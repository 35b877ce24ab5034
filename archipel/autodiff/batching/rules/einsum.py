"""Einsum: the lanes get a letter of their own in the equation."""

from __future__ import annotations

import string

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule


@batch_rule("Einsum")
def einsum(ctx: LaneContext) -> BatchedResults:
    given = ctx.attribute("equation", "")
    equation = (given.decode() if isinstance(given, bytes) else given).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        # The letters that occur once, in order, behind the axes of the ellipsis.
        once = [c for c in sorted(set(left)) if c.isalpha() and left.count(c) == 1]
        right = ("..." if "..." in left else "") + "".join(once)
    letter = next(c for c in string.ascii_letters if c not in equation)
    moved = [letter + term if ctx.batched(i) else term for i, term in enumerate(terms)]
    return ctx.same(*ctx.values(), equation=f"{','.join(moved)}->{letter}{right}")
