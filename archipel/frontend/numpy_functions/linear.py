"""Products of matrices and vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from archipel.frontend import operators
from archipel.frontend.emit import Emitter
from archipel.frontend.numpy_functions.joining import as_array
from archipel.frontend.table import numpy_name
from archipel.frontend.values import BOOL, Tensor, describe, refuse


@numpy_name("matmul")
def matmul(e: Emitter, x1: Any, x2: Any) -> Tensor:
    return operators.matmul(e, x1, x2)


@numpy_name("dot", method=True)
def dot(e: Emitter, a: Any, b: Any) -> Tensor:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.rank or not b.rank:
        return operators.multiply(e, as_array(e, a), as_array(e, b))
    if b.rank > 2:
        refuse(f"np.dot with {describe(b)} is not supported; use np.matmul or np.einsum")
    return operators.matmul(e, a, b)


@numpy_name("outer")
def outer(e: Emitter, a: Any, b: Any) -> Tensor:
    column = e.reshape(a, [-1, 1]) if isinstance(a, Tensor) else refuse("np.outer takes arrays")
    row = e.reshape(b, [1, -1]) if isinstance(b, Tensor) else refuse("np.outer takes arrays")
    return operators.multiply(e, column, row)


@numpy_name("inner", "vdot")
def inner(e: Emitter, a: Any, b: Any) -> Tensor:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.rank == b.rank == 1):
        refuse("np.inner takes two vectors; use np.einsum")
    return operators.matmul(e, a, b)


@numpy_name("trace")
def trace(e: Emitter, a: Any) -> Tensor:
    if not isinstance(a, Tensor) or a.rank != 2:
        refuse(f"np.trace of {describe(a)} is not supported; use np.einsum")
    return einsum(e, "ii->", a)


@numpy_name("einsum")
def einsum(e: Emitter, subscripts: Any, *operands: Any) -> Tensor:
    if not isinstance(subscripts, str):
        refuse("np.einsum takes its subscripts as text, such as 'ij,jk->ik'")
    dtype, _ = e.common_type(*operands)
    if dtype == BOOL:
        refuse("np.einsum of truth values is not supported; use .astype")
    equation = subscripts.replace(" ", "")
    _check(equation, operands)
    return Tensor(e.op.Einsum(*(e.value(x, dtype) for x in operands), equation=equation))


def _check(equation: str, operands: tuple[Any, ...]) -> None:
    terms = equation.split("->")[0].split(",")
    if len(terms) != len(operands):
        refuse(f"np.einsum: {len(terms)} terms in {equation!r}, {len(operands)} arrays")
    sizes: dict[str, Any] = {}
    for term, x in zip(terms, operands):
        if not isinstance(x, Tensor) or ("..." not in term and len(term) != x.rank):
            refuse(f"np.einsum: the term {term!r} for {describe(x)}")
        if "..." not in term:
            for letter, size in zip(term, x.shape):
                known = sizes.setdefault(letter, size)
                if isinstance(size, int) and isinstance(known, int) and size != known and np.min([size, known]) != 1:
                    refuse(f"np.einsum: {letter!r} has the sizes {known} and {size}")
