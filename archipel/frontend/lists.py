"""Lists that grow: at once while the function is read, or by one item in each iteration of a loop.

A loop's list becomes a scan output of its Loop: the items stacked along a new first axis.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import numpy as np

from archipel.frontend.liveness import contains
from archipel.frontend.reader import Reader
from archipel.frontend.values import Rows, Tensor, Unbound, describe, refuse

_REMEDY = "append once in each iteration, as a statement of the loop's body before any break, continue or return"


def append(r: Reader, node: ast.Call) -> None:
    """`name.append(value)`."""
    assert isinstance(node.func, ast.Attribute)
    owner = node.func.value
    if not isinstance(owner, ast.Name) or len(node.args) != 1 or node.keywords:
        refuse("append is supported as name.append(value)")
    name = owner.id
    value = r.evaluate(node.args[0])
    if node in r.frame.appends:
        r.frame.appends[node] = value
        # The list's items are other names of what is appended, also in later iterations.
        r.frame.names[items_of(name)] = (r.frame.names[items_of(name)], value)
        return
    found = r.frame.look_up(name)
    if isinstance(found, Rows):
        refuse(f"{name!r} was filled by a loop already; use another list")
    if not isinstance(found, list):
        refuse(f"{describe(found)} has no append; set items of an array, y[i] = ...")
    if r.homes.get(id(found), (None, None))[1] is not r.e.op:
        refuse(f"{name!r} cannot grow here: {_REMEDY}; or make an array with np.zeros and set its items")
    found.append(value)


def begin(r: Reader, body: Sequence[ast.stmt]) -> dict[ast.Call, str]:
    """The appends of a loop's body that become scan outputs -> the lists' names. Each list is empty before."""
    calls: dict[ast.Call, str] = {}
    for at, node in enumerate(body):
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "append":
            continue
        name = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        found = r.frame.names.get(name)
        if not isinstance(found, list) or name in calls.values() or _jumps(body[:at]):
            continue
        if r.homes.get(id(found), (None, None))[1] is r.e.op:
            if found:
                refuse(
                    f"{name!r} has {len(found)} items before the loop; fill an empty list, and join the two after it"
                )
            calls[call] = name
    return calls


def items_of(name: str) -> str:
    """The variable that stands for the items of a list that a loop fills, in the search for shared memory."""
    return f"$the items of {name!r}"


def hide(r: Reader, calls: dict[ast.Call, str]) -> None:
    """Make the lists unreadable while an iteration is read, which knows none of the items."""
    for name in calls.values():
        r.frame.names[items_of(name)] = Tensor(const=np.zeros(1), storage=frozenset())
        r.frame.names[name] = Unbound(f"the items of {name!r} are not known in the loop that fills it; read it after")


def _jumps(body: Sequence[ast.stmt]) -> bool:
    return (
        contains(body, ast.Return, inner_loops=True)
        or contains(body, ast.Break, inner_loops=False)
        or contains(body, ast.Continue, inner_loops=False)
    )
