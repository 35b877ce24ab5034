"""Programs in the corners of Python's syntax, which must give what Python gives."""

# ruff: noqa: PIE800, SIM108

from __future__ import annotations

import functools

import numpy as np

from tests.frontend.cases import M, V, case


def doubled(function):
    @functools.wraps(function)
    def inner(*arguments):
        return function(*arguments) * 2

    return inner


@case(M)
@doubled
def decorated(x):
    return x + 1


@case(V)
def shadows_names(x):
    numpy, len = np, x.sum()
    sum = len + 1
    return numpy.exp(x) * sum


@case(V)
def functions_in_functions(x):
    def outer(y):
        def inner(z):
            return z + y + x[0]

        return inner(y) * 2

    return outer(x) + outer(1.0)


@case(V, others=((-V,), (V * 0 + 4,)))
def nested_deeply(x):
    for i in range(2):
        if x[i] > 0:
            for j in range(2):
                if x[j] < 0:
                    while x[0] < 10:
                        if x[1] > 5:
                            x = x + 1
                        else:
                            x = x * x + 1
                else:
                    x = x - 1
    return x


@case(V)
def texts_with_formats(x):
    return x + len(f"{3}-{x.shape[0]:03d}-{'a'!r:>{x.shape[0] + 2}}-{1.5:.3f}-{np.float32(0.1)}")


@case(V)
def comprehensions_over_several(x):
    table = {(a, b): a * b for a in range(3) if a for b in (a, 10)}
    return sum(a * b for a in (1, 2) for b in (3, 4)) * x + sum(table.values()) * table[2, 10]


@case(V)
def dicts_in_dicts(x):
    given = {"a": x, "b": 2.0}
    found = {**given, "b": 3.0, **{"c": 4.0}}
    return found["a"] * found["b"] + found["c"] + len(found)


@case(V, others=((V * 0,), (-V,)))
def endless_loops(x):
    count = 0
    while True:
        x = x * x + 1
        count += 1
        if x.max() > 50:
            break
    while 1:
        x = x - 1
        if x.max() < count:
            return x, count


@case(np.int64(0), others=((np.int64(7),), (np.int64(20),)))
def break_before_a_cheap_test(n):
    steps = 0
    while n < 10:
        n += 1
        if n % 4 == 3:
            break
        steps = steps + n
    return n, steps


@case(np.int64(3), others=((np.int64(0),), (np.int64(12),)))
def a_test_that_divides(n):
    total = 0
    while 24 // n > 2:
        n = n + 1
        total += n
        if n == 6:
            break
    return total if n != 0 else -1


@case(V, others=((-V,),))
def marks_of_truth(x):
    positive, rest = False, True
    if x.sum() > 0:
        positive, rest = True, False
    return x * positive, positive, rest, not rest


@case(5, others=((64,),))
def integers_that_become_floats(n):
    i = n * 1
    total = 0
    while i > 1:
        i = i / 2 if n > 8 else i - 1.0
        total = total + i
    return total


@case(V)
def tuples_and_slices(x):
    first, *others = x
    part = slice(0, 2)
    a, b = (first, others[1]), x[part]
    a, b = b, a
    return a * 2, b[0] - b[1]


@case(V)
def swaps_items(x):
    y = x.copy()
    y[0], y[-1] = y[-1], y[0]
    y[1:] *= 2
    y[0] **= 2
    return y


@case(V, np.float32(2), others=((V, np.float32(-9)), (-V, np.float32(0.3))))
def fills_a_list_after_a_return(x, least):
    for item in x * 1:
        if item < least:
            return x, item
        found = []
        for j in range(3):
            found.append(x * j)
            last = x[j]
        x = np.mean(found, axis=0) - last
    return x, least
