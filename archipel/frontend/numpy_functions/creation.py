"""Functions that make arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from archipel.frontend.emit import Emitter, as_sizes
from archipel.frontend.iterables import Range, make_range
from archipel.frontend.numpy_functions.elementwise import astype
from archipel.frontend.numpy_functions.joining import stack
from archipel.frontend.table import numpy_name
from archipel.frontend.values import Rows, Tensor, refuse


@numpy_name("zeros", "empty")
def zeros(e: Emitter, shape: Any, dtype: Any = float) -> Tensor:
    return e.fill(as_sizes(shape), 0, dtype)


@numpy_name("ones")
def ones(e: Emitter, shape: Any, dtype: Any = float) -> Tensor:
    return e.fill(as_sizes(shape), 1, dtype)


@numpy_name("full")
def full(e: Emitter, shape: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    return e.fill(as_sizes(shape), fill_value, e.common_type(fill_value)[0] if dtype is None else dtype)


@numpy_name("full_like")
def full_like(e: Emitter, a: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    a = astype(e, a, e.common_type(a)[0])
    shape = [e.size(a, axis) for axis in range(a.rank)]
    return e.fill(shape, fill_value, a.dtype if dtype is None else dtype)


@numpy_name("zeros_like", "empty_like")
def zeros_like(e: Emitter, a: Any, dtype: Any = None) -> Tensor:
    return full_like(e, a, 0, dtype)


@numpy_name("ones_like")
def ones_like(e: Emitter, a: Any, dtype: Any = None) -> Tensor:
    return full_like(e, a, 1, dtype)


@numpy_name("arange")
def arange(e: Emitter, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Tensor:
    numbers = make_range(*([start] if stop is None else [start, stop, step]))
    if isinstance(numbers, range):
        return Tensor(const=np.arange(numbers.start, numbers.stop, numbers.step, dtype=dtype))
    assert isinstance(numbers, Range)
    if isinstance(numbers.step, int) and numbers.step == 0:
        refuse("np.arange needs a step other than 0")
    values = [e.value(n, np.int64) for n in (numbers.start, numbers.stop, numbers.step)]
    found = e.op.Range(*values)
    stop_dim = numbers.stop.dim if isinstance(numbers.stop, Tensor) else None
    if numbers.start == 0 and numbers.step == 1 and stop_dim:
        found.shape = type(found.shape)([stop_dim]) if found.shape is not None else None
    return Tensor(found) if dtype is None else e.cast(Tensor(found), dtype)


@numpy_name("eye")
def eye(e: Emitter, N: Any, M: Any = None, dtype: Any = float) -> Tensor:
    rows = arange(e, N)
    columns = rows if M is None else arange(e, M)
    down = Tensor(e.op.Unsqueeze(e.value(rows), [1]))
    return e.cast(e.compare("Equal", down, columns), dtype)


@numpy_name("asarray", "ascontiguousarray")
def asarray(e: Emitter, a: Any, dtype: Any = None) -> Tensor:
    """As `np.array`, but perhaps the same memory."""
    found = array(e, a, dtype)
    return Tensor(found.value, const=found.const, storage=a.storage) if isinstance(a, Tensor) else found


@numpy_name("array")
def array(e: Emitter, a: Any, dtype: Any = None) -> Tensor:
    """Of an array, a number or (nested) lists of scalars and arrays of one shape."""
    if isinstance(a, tuple | list):
        parts = [array(e, item) for item in a]
        if not parts:
            refuse("an empty list has no type; use np.zeros((0,))")
        found = stack(e, parts)
    elif isinstance(a, Rows):
        found = a.tensor
    else:
        found = Tensor(e.value(a))
    return found if dtype is None else astype(e, found, dtype)
