"""The form of a variable where branches meet and from one iteration to the next: its types and shapes.

A tuple is as many values of the graph as it has leaves. What the graph does not hold (a string, a function) must be
the same on all ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from archipel.frontend.emit import Emitter
from archipel.frontend.values import (
    BOOL,
    PYTHON_TYPES,
    Inner,
    Tensor,
    Unbound,
    describe,
    is_numeric,
    python_type,
    refuse,
)
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim


@dataclass(frozen=True)
class Leaf:
    """A value of the graph; `python` is bool, int or float for a Python number."""

    dtype: np.dtype
    python: type | None
    shape: tuple[Dim, ...]
    dim: str | None = None


@dataclass(frozen=True)
class Same:
    """An object that the graph does not hold."""

    value: Any


@dataclass(frozen=True)
class Items:
    """A tuple."""

    items: tuple[Form, ...]


@dataclass(frozen=True)
class Missing:
    """No value yet. Where the function cannot read it, any value of the other way's form takes its place."""

    reason: str


Form = Leaf | Same | Items | Missing


def form_of(value: Any) -> Form:
    if isinstance(value, Unbound):
        return Missing(value.reason)
    if isinstance(value, Tensor):
        return Leaf(value.dtype, value.python, value.shape, value.dim)
    if (kind := python_type(value)) is not None:
        return Leaf(PYTHON_TYPES[kind], kind, ())
    if isinstance(value, tuple):
        return Items(tuple(map(form_of, value)))
    return Same(value)


def common_form(a: Form, b: Form, where: str) -> Form:
    """The form that holds both. Raises UnsupportedError; `where` says whose forms, as "'x' is {} ... and {} ..."."""
    if isinstance(a, Missing) or isinstance(b, Missing):
        return a if isinstance(b, Missing) else b
    if isinstance(a, Items) and isinstance(b, Items) and len(a.items) == len(b.items):
        return Items(tuple(common_form(x, y, where) for x, y in zip(a.items, b.items)))
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        return _common_leaf(a, b, where)
    if isinstance(a, Same) and isinstance(b, Same) and (a.value is b.value or _equal(a.value, b.value)):
        return a
    remedy = "a variable must have one type on all ways"
    if Same(None) in (a, b):
        remedy = "start with a value of the later type, and mark with a variable of truth values that there is none"
    if isinstance(a, Same) and isinstance(b, Same) and isinstance(a.value, list) and isinstance(b.value, list):
        remedy = "a list must be the same on all ways; write a tuple"
    elif isinstance(a, Same) and isinstance(a.value, Inner):
        remedy = "a function must be the same on all ways; call one on each"
    refuse(f"{where.format(_name(a), _name(b))}; {remedy}")


def _common_leaf(a: Leaf, b: Leaf, where: str) -> Leaf:
    remedy = "give it the type that it has later from the start, as with .astype or np.zeros"
    shape = tuple(x if x == y else None for x, y in zip(a.shape, b.shape))
    dim = a.dim if a.dim == b.dim else None
    dtype, python = a.dtype, a.python
    if a.python is not None and b.python is not None:
        if a.python is not b.python and bool in (a.python, b.python):
            refuse(f"{where.format(_name(a), _name(b))}; {remedy}")
        python = a.python if a.python is b.python else float
        dtype = PYTHON_TYPES[python]
    elif len(a.shape) != len(b.shape):
        refuse(f"{where.format(_name(a), _name(b))}; its rank must not change: start with an array such as np.zeros")
    elif a.python is not None or b.python is not None:
        # A Python number takes the type of the NumPy scalar on the other way, as it would in arithmetic with it.
        number, other = (a, b) if a.python is not None else (b, a)
        weak: Any = {bool: True, int: 1, float: 1.0}[number.python or float]
        if np.result_type(other.dtype, weak) != other.dtype or (other.dtype == BOOL) != (number.python is bool):
            refuse(f"{where.format(_name(a), _name(b))}; {remedy}")
        dtype, python = other.dtype, None
    elif a.dtype != b.dtype:
        refuse(f"{where.format(_name(a), _name(b))}; {remedy}")
    return Leaf(dtype, python, shape, dim)


def flatten(e: Emitter, value: Any, form: Form) -> list[ir.Value]:
    """The leaves of a value in its form, as values of the graph; zeros where there is no value."""
    if isinstance(form, Leaf):
        return [_zeros(e, form)] if isinstance(value, Unbound) else [e.value(value, form.dtype)]
    if isinstance(form, Items):
        items = [value] * len(form.items) if isinstance(value, Unbound) else value
        return [leaf for item, inner in zip(items, form.items) for leaf in flatten(e, item, inner)]
    return []


def leaves(form: Form) -> list[Leaf]:
    if isinstance(form, Items):
        return [leaf for item in form.items for leaf in leaves(item)]
    return [form] if isinstance(form, Leaf) else []


def rebuild(form: Form, values: Iterator[ir.Value]) -> Any:
    """The value whose leaves these are."""
    if isinstance(form, Leaf):
        value = next(values)
        return Tensor(value, python=form.python, dim=form.dim)
    if isinstance(form, Items):
        return tuple(rebuild(item, values) for item in form.items)
    return Unbound(form.reason) if isinstance(form, Missing) else form.value


def declare(values: list[ir.Value], form: Form) -> list[ir.Value]:
    """Give results of an If or Loop the types and shapes of the form's leaves."""
    for value, leaf in zip(values, leaves(form)):
        value.dtype, value.shape = ir.DataType.from_numpy(leaf.dtype), ir.Shape(list(leaf.shape))
    return values


def parameters(op: Builder, form: Form, name: str) -> list[ir.Value]:
    """Inputs of a body for the form's leaves."""
    return [
        op.input(
            op.unique(name),
            ir.DataType.from_numpy(leaf.dtype),
            [op.unique("size") if d is None else d for d in leaf.shape],
        )
        for leaf in leaves(form)
    ]


def _zeros(e: Emitter, leaf: Leaf) -> ir.Value:
    # Symbolic sizes are those of inputs where that is possible, so that shapes stay known; else 0.
    sizes = [d if isinstance(d, int) else e.sizes.get(d or "", 0) for d in leaf.shape]
    if not sizes:
        return e.op.constant(np.zeros((), leaf.dtype))
    return e.value(e.fill(sizes, 0, leaf.dtype))


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, str | bytes | np.dtype | type | slice | range) and a == b


def _name(form: Form) -> str:
    if isinstance(form, Leaf):
        if form.python is not None:
            return f"a Python {form.python.__name__}"
        sizes = ", ".join("?" if d is None else str(d) for d in form.shape)
        return f"{form.dtype}[{sizes}]" if form.shape else f"a {form.dtype} scalar"
    if isinstance(form, Items):
        return f"a tuple of {len(form.items)}"
    return "not assigned" if isinstance(form, Missing) else describe(form.value)


def is_leaf(value: Any) -> bool:
    return is_numeric(value)
