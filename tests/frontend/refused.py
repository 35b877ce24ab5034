"""Functions that have no graph. The comment `# here` marks the line that the error names."""

# ruff: noqa: B007, F821, F841, RUF059, SIM108

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

X = np.ones((2, 3), np.float32)
V = np.ones(3, np.float32)
N = np.array([1, 2, 3])


class Refused(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    text: str


REFUSED: list[Refused] = []


def refused(text: str, *arguments: Any) -> Callable[[Any], Any]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        REFUSED.append(Refused(function, arguments, text))
        return function

    return add


@refused("'y' is assigned in only one branch of the if in line {-2}; assign it in the other branch or before the if", X)
def one_branch(x):
    if x.sum() > 0:
        y = x
    return y  # here


@refused(
    "'total' is a Python float before the loop in line {0} and float32[3] after an iteration; its rank must not", X
)
def rank_changes(x):
    total = 0.0
    for row in x:  # here
        total = total + row
    return total


@refused("'x' is float32[2, 3] before the loop in line {0} and float64[2, 3] after an iteration; give it the type", X)
def type_changes(x):
    for _ in range(3):  # here
        x = x * np.float64(2)
    return x


@refused("'y' is float32[2, 3] on one way of the if in line {0} and int64[3] on the other", X, N)
def types_differ(x, n):
    if n[0] > 0:  # here
        y = x
    else:
        y = n
    return y


@refused("'y' is assigned only in the loop in line {-2}, which may have no iteration; assign it before the loop", V, 3)
def only_in_a_loop(x, n):
    for i in range(n):
        y = x[i]
    return y  # here


@refused("'y' may have no value after the loop in line {-4}, where an iteration can end before it is assigned; ass", V)
def left_before_it_is_assigned(x):
    for i in range(3):
        if x[i] > 0:
            break
        y = x[i]
    return y  # here


@refused("'y' may have no value after the loop in line {-4}, where an iteration can end before it is assigned; ass", V)
def left_before_it_is_assigned_when_written_out(x):
    for i in (0, 1):
        if x[i] > 0:
            break
        y = x[i]
    return y  # here


@refused("'best' is None before the loop in line {0} and float32[3] after an iteration; start with a value of the", X)
def starts_with_none(x):
    best = None
    for row in x:  # here
        if best is None or row[0] > best[0]:
            best = row
    return best


@refused("'y' has no value in the first iteration of the loop in line {-1}; assign it before the loop", V, 3)
def before_its_first_value(x, n):
    for i in range(n):
        x = x + y  # here
        y = x
    return x


@refused("'mode' is of type str before the loop in line {0} and a Python int after an iteration", V)
def text_changes(x):
    mode = "start"
    while x.sum() < 9:  # here
        x = x + 1 if mode == "start" else x
        mode = 3
    return x


@refused("the name 'undefined_name' is not defined", X)
def undefined(x):
    return x + undefined_name  # here


@refused("the condition of the if is float32[2, 3]: an array has no truth value; use np.any or np.all, np.where", X)
def truth_of_an_array(x):
    if x > 0 if False else x:  # here
        return x
    return -x


@refused("a chained comparison of bool[2, 3] is not supported; join the two with np.logical_and", X)
def chained(x):
    return 0 < x < 1  # here


@refused("recursive calls itself: a graph has no recursion; write it as a loop", np.int64(3))
def recursive(n):
    if n < 1:
        return 1
    return n * recursive(n - 1)  # here


@refused("not_always may end without a return; return a value on every way", V)
def not_always(x):  # here
    if x[0] > 0:
        return x


@refused("np.fft.fft is not supported on what depends on the inputs or weights", V)
def unknown_function(x):
    return np.fft.fft(x)  # here


@refused("np.nanmean is not supported on what depends on the inputs or weights; similar ones are supported: np.mean", V)
def unknown_ufunc(x):
    return np.nanmean(x)  # here


@refused(".cumprod of an array is not supported; similar ones are supported: prod", V)
def unknown_method(x):
    return x.cumprod()  # here


@refused("np.random.normal: a graph draws no random numbers of NumPy; pass them as an argument", V)
def random_numbers(x):
    return x + np.random.normal(size=3)  # here


@refused("random.random: a graph draws no random numbers of NumPy; pass them as an argument", V)
def python_random(x):
    return x * random.random()  # here


@refused(
    "np.sum: got an unexpected keyword argument 'where'; supported: np.sum(a, axis=None, dtype=None, keepdims=False)", V
)
def unknown_argument(x):
    return np.sum(x, where=x > 0)  # here


@refused("an array of truth values as index gives a size that depends on the content; use np.where", V)
def mask(x):
    return x[x > 0]  # here


@refused("np.where(condition) gives a size that depends on the content; give np.where(condition, x, y)", V)
def where_alone(x):
    return np.where(x > 0)  # here


@refused("x += ... changes an array of the caller in place, which a graph cannot; write x = x + ...", V)
def changes_its_argument(x):
    x += 1  # here
    return x


@refused("y[...] = ... changes 'z' too, which may be the same array; write y = y.copy()", V)
def changes_two(x):
    y = x * 2
    z = y if x[0] > 3 else x
    y[0] = 1  # here
    return y + z


@refused("a += ... changes 'b' too, which may be the same array; write a = a + ...", V, 3)
def changes_two_from_the_second_iteration_on(x, n):
    a, b = x * 1, x * 2
    for i in range(n):
        a += 1  # here
        if i > 0:
            b = a
    return a, b


@refused("y[...] = ... changes an array of the caller in place, which a graph cannot; write y = y.copy()", V, 3)
def changes_its_argument_from_the_second_iteration_on(x, n):
    y = x * 1
    for i in range(n):
        y[0] = i  # here
        y = x
    return y


@refused("v += ... changes 'y' too, which may be the same array; write v = v + ...", V)
def changes_the_variable_of_a_caller(x):
    def change(v):
        v += 1  # here
        return v

    y = x * 2
    return change(y) + y


@refused("y += ...: NumPy writes no float64 into int64[3]; use y = y + ...", V, N)
def into_integers(x, n):
    y = n * 2
    y += x  # here
    return y


@refused("axis 2 of an array with 2 axes", X)
def wrong_axis(x):
    return x.sum(axis=2)  # here


@refused("the matrix product of float32[2, 3] and float32[2, 3]: 3 and 2 must be equal", X)
def wrong_shapes(x):
    return x @ x  # here


@refused("float32[2, 3] and float32[3, 2] do not broadcast: sizes of an axis must be equal or 1", X)
def no_broadcast(x):
    return x + x.T  # here


@refused("3 indices for an array of rank 2", X)
def too_many_indices(x):
    return x[0, 0, 0]  # here


@refused(
    "a tuple of 3 is indexed by a number that only the graph knows; go over its items (for x in ...), or make", V, 1
)
def tuple_by_number(x, i):
    return (x, x * 2, x * 3)[i]  # here


@refused("'found' cannot grow here: append once in each iteration, as a statement of the loop's body before any", V, 3)
def append_in_a_branch(x, n):
    found = []
    for i in range(n):
        if x[i] > 0:
            found.append(x)  # here
    return np.stack(found)


@refused("the items of 'found' are not known in the loop that fills it; read it after", V, 3)
def reads_what_it_fills(x, n):
    found = []
    for i in range(n):
        found.append(x if i < 1 else found[-1])  # here
    return np.stack(found)


@refused("'found' has 1 items before the loop; fill an empty list, and join the two after it", V, 3)
def fills_a_list_with_items(x, n):
    found = [x]
    for i in range(n):  # here
        found.append(x * i)
    return np.stack(found)


@refused("try is not supported in functions that become graphs", V)
def tries(x):
    try:  # here
        return x
    except ValueError:
        return -x


@refused("else of a for is not supported; set a variable before break and test it after the loop", V)
def for_else(x):
    for i in range(3):  # here
        x = x + i
    else:
        x = -x
    return x


@refused("the function raises here; a graph raises no errors: return a value that says it", V)
def raises(x):
    if x[0] < 0:
        raise ValueError("negative")  # here
    return x


@refused("assert of what depends on the inputs: a graph raises no errors", V)
def asserts(x):
    assert len(x) == 3
    assert x[0] > 0  # here
    return x


@refused("the assertion does not hold: three, not 3", V)
def assertion_fails(x):
    assert len(x) == 4, f"three, not {len(x)}"  # here
    return x


@refused("print: a graph prints nothing; return the value", V)
def prints(x):
    print(x)  # here
    return x


@refused("an object's attribute cannot be set in a graph; return the new value instead", V)
def sets_attribute(x):
    x.flags.writeable = False  # here
    return x


@refused("/: ZeroDivisionError: division by zero", V)
def constant_error(x):
    return x + 1 / 0  # here


@refused("arrays of float16 are not supported: graphs of functions compute in float32, float64, int32, int64 and", V)
def half(x):
    return x.astype(np.float16)  # here


@refused("layer2(): missing a required argument: 'weight'", V)
def wrong_call(x):
    def layer2(v, weight):
        return v @ weight

    return layer2(x)  # here


def _inner(x):
    return np.linalg.svd(x)  # here


@refused(
    "np.linalg.svd is not supported on what depends on the inputs or weights; see docs",
    X,
)
def error_in_a_call(x):
    return _inner(x)


@refused("generators and coroutines are not supported; return a tuple or an array", V)
def generator(x):
    yield x  # here


@refused("3 values are unpacked, there are 2", X)
def unpacks(x):
    a, b, c = x  # here
    return a


@refused("AttributeError: 'list' object has no attribute 'rank'; pass arrays, numbers and tuples as NumPy's docum", V)
def argument_of_another_kind(x):
    return np.split([x, x], 2)[0]  # here


@refused("+ of float32[3] and of type str is not supported", V)
def array_and_text(x):
    return x + "a"  # here


@refused("an index has one ellipsis (...) at most", X)
def two_ellipses(x):
    return x[..., ...]  # here
