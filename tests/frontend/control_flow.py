"""Programs with if, while, for, break, continue, return and calls."""

# ruff: noqa: SIM108

from __future__ import annotations

import numpy as np

from tests.frontend.cases import B1, SHIFTS, W1, C, D, M, N, V, case

# If.


@case(M, others=((-M,), (M * 0,)))
def if_else(x):
    if x.sum() > 0:
        y = x * 2
    else:
        y = x - 1
    return y


@case(np.float32(3), others=((np.float32(-3),), (np.float32(0),)))
def elif_chain(x):
    if x > 1:
        return x * 2
    elif x < -1:
        return -x
    return x + 10


@case(M, others=((-M,),))
def if_without_else(x):
    y = x
    if x[0, 0] > 0:
        y = y + 1
    return y, x


@case(np.float32(5), others=((np.float32(15),), (np.float32(-5),)))
def nested_if(x):
    kind = 0
    if x > 0:
        if x > 10:
            kind = 2
        else:
            kind = 1
        x = -x
    return x, kind


@case(np.int64(5), np.int64(2), others=((np.int64(1), np.int64(9)), (np.int64(-4), np.int64(-4))))
def may_return(a, b):
    if a > b:
        if a - b > 2:
            return a
        a = a + 100
    elif a == b:
        return b * 3
    return a - b


@case(M, others=((-M,),))
def conditional_expression(x):
    return (x if x.mean() > 0 else -x) * (2 if x.shape[0] == 4 else 3)


@case(np.float32(0.5), others=((np.float32(5.5),), (np.float32(-1.0),)))
def chained_comparison(x):
    return 1 if 0 < x < 1 else 0


@case(np.int64(2), V, others=((np.int64(7), V), (np.int64(-1), -V)))
def short_circuit(i, x):
    if 0 <= i < len(x) and x[i] > 0:
        return 1
    if i < 0 or x[i % 3] > 100:
        return 2
    return 3


@case(True, np.bool_(False), others=((False, np.bool_(True)), (True, np.bool_(True))))
def not_and_or(a, b):
    return not a, a and b, a or b, (a and not b) or (b and not a)


@case(M, others=((-M,),))
def tuple_from_branch(x):
    if x[0, 0] > 0:
        pair = (x.sum(), x.max())
    else:
        pair = (x.max(), x.min())
    low, high = pair
    return high - low


@case(np.float32(200), others=((np.float32(70),), (np.float32(0),), (np.float32(-70),), (np.float32(-700),)))
def variables_on_the_ways_that_stay(s):
    if s > 100:
        return s * 1
    elif s > 50:
        y = s * 2
    elif s > -100:
        y = s * 3
        if s > -50:
            return y
    else:
        y = np.array([1, 2])
        return s * 5
    return y + 1


@case(M, 3, others=((-M, 2), (M, 0)))
def variables_of_one_iteration(x, n):
    total = np.float32(0)
    for i in range(n):
        if x[i, 0] > 0:
            if x[i, 1] > 0:
                continue
            part = x[i].sum()
        else:
            part = x[i].max()
            if part > 1:
                break
        total = total + part
    return total


@case(V, 3, others=((V, 30),))
def loop_that_only_return_ends(x, n):
    import numpy

    i = 0
    while True:
        x = numpy.abs(x) * 1.1
        i += 1
        if i >= n:
            return x, i


# While.


@case(np.float32(2), np.float32(1000), others=((np.float32(2), np.float32(1)), (np.float32(1.5), np.float32(7))))
def while_loop(x, bound):
    n = 0
    while x < bound:
        x = x * x
        n += 1
    return x, n


@case(np.int64(27), others=((np.int64(1),), (np.int64(9),)))
def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


@case(np.int64(48), np.int64(36), others=((np.int64(7), np.int64(0)),))
def greatest_divisor(a, b):
    while b:
        a, b = b, a % b
    return a


@case(np.float64(2.0), others=((np.float64(100.0),),))
def newton(x):
    guess = x
    while True:
        better = 0.5 * (guess + x / guess)
        if abs(better - guess) < 1e-9:
            break
        guess = better
    return better


@case(V, others=((-V,), (V * 0 + 1,)))
def while_with_index(x):
    i = 0
    while i < len(x) and x[i] < 0.5:
        i += 1
    return i


# For.


@case(V)
def fixed_range(x):
    for i in range(5):
        x = x * 0.5 + i
    return x


@case(V, 4, others=((V, 0), (V, 1)))
def data_dependent_range(x, n):
    total = x * 0
    for i in range(n):
        total = total + x * i
    return total


@case(10, 3, others=((3, 10), (4, 4)))
def range_down(a, b):
    seen = 0
    for i in range(a, b, -2):
        seen = seen * 10 + i
    return seen


@case(2, 11, others=((2, 2), (2, 12)))
def range_with_step(a, b):
    seen = 0
    for i in range(a, b, 3):
        seen = seen * 100 + i
    return seen, b


@case(M)
def rows(x):
    best = x[0]
    for row in x:
        best = np.maximum(best, row)
    return best


@case(M, D)
def zip_of_arrays(a, b):
    total = 0.0
    for i, (x, y) in enumerate(zip(a, b)):
        total = total + i * (x @ y)
    return total


@case(M, others=((-M,),))
def break_and_continue(x):
    total, count = np.float32(0), 0
    for row in x:
        if row[0] < 0:
            continue
        if total > 1.5:
            break
        total = total + np.abs(row).sum()
        count += 1
    return total, count


@case(N[0], 2, others=((N[0], 5), (N[0], -3)))
def return_from_loop(x, wanted):
    for i in range(len(x)):
        if x[i] == wanted:
            return i
    return -1


@case(M, others=((-M,), (M * 0,)))
def return_from_inner_loop(x):
    for i in range(4):
        for j in range(3):
            if x[i, j] > 1.0:
                return i, j, x[i]
        if x[i].sum() < -2:
            break
    return -1, -1, x[0]


@case(M)
def nested_loops(x):
    total = 0.0
    for i in range(x.shape[0]):
        for j in range(i):
            if j == 2:
                continue
            total += float(x[i, 0] * x[j, 1])
    return total


@case(12, others=((2,), (30,)))
def primes(n):
    count = 0
    for i in range(2, n):
        prime = True
        for j in range(2, i):
            if j * j > i:
                break
            if i % j == 0:
                prime = False
                break
        if prime:
            count += 1
    return count


@case(V)
def last_value_of_a_loop(x):
    for i in range(3):
        y = x[i] * 2
    return i, y


@case(V)
def written_out(x):
    for shift in SHIFTS:
        x = x + shift
    for name, factor in (("a", 2.0), ("b", 3.0)):
        x = x * factor if name == "a" else x - factor
    return x


@case(V, 1.0, others=((V, 2.5), (V, 9.0), (V, -9.0)))
def written_out_with_break(x, bound):
    total = 0.0
    for shift in SHIFTS:
        if shift > bound:
            break
        if shift + bound < -5:
            return x
        total = total + x[shift - 1]
    return x * total


@case(V)
def fibonacci(x):
    a, b = x, x + 1
    for _ in range(6):
        a, b = b, a + b
    return a


@case(np.float32(0.3))
def horner(x):
    result = 0.0
    for c in (1.0, -2.0, 3.0):
        result = result * x + c
    return result


@case(C)
def recurrent(x):
    h = np.zeros((2, 5), np.float32)
    for t in range(x.shape[2]):
        h = np.tanh(x[:, :, t] @ W1 + h * B1)
    return h


@case(V, 6, others=((V, 1),))
def array_that_grows(x, n):
    y = x[:1]
    for _ in range(n):
        y = np.concatenate([y, y[-1:] * 2])
    return y


@case(V, 5, others=((V, 0),))
def items_that_are_set(x, n):
    y = np.zeros(8)
    y[0] = 1
    for i in range(n):
        y[i + 1] = y[i] * 2 + x[i % 3]
    y[-1] = 7
    return y


@case(M)
def rows_and_columns_that_are_set(x):
    y = x.copy()
    y[1] = 5
    y[:, 2] = y[:, 0] * 10
    y[2:, :2] += 1
    y[[0, 3], 1] = 9
    y[y > 4] = -1
    return y
