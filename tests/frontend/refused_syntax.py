"""Syntax that has no graph: each error says what to write instead. `# here` marks the line that it names."""

# ruff: noqa: B007, B023, F841

from __future__ import annotations

import numpy as np

from tests.frontend.refused import V, refused

G = np.array([10.0, 20.0, 30.0], np.float32)
AS_GRAPH = "not supported in functions that become graphs"


@refused(f"an assignment inside an expression (:=) is {AS_GRAPH}; assign in a statement before it", V)
def walrus(x):
    if (total := x.sum()) > 0:  # here
        return x * total
    return x


@refused(
    "a text with a value that only the graph knows is not supported; leave the value out, or return it beside the oth",
    V,
)
def text_of_an_input(x):
    name = f"{x[0]:.2f}"  # here
    return x


@refused("a Python float in a text does not have this format: Unknown format code 'd' for object of type 'float'", V)
def wrong_format(x):
    return x + len(f"{1.5:d}")  # here


@refused(f"with is {AS_GRAPH}; leave it out (np.errstate changes no number), or call the function inside it", V)
def in_a_context(x):
    with np.errstate(all="ignore"):  # here
        return np.log(x)


@refused(f"global is {AS_GRAPH}; pass the value as an argument and return the new one", V)
def global_variable(x):
    global G  # here
    return x + G


@refused(f"nonlocal is {AS_GRAPH}; pass the value as an argument and return the new one", V)
def outer_variable(x):
    total = x

    def add():
        nonlocal total  # here
        total = total + 1

    add()
    return total


@refused(f"del is {AS_GRAPH}; leave it out: what nobody reads takes no memory", V)
def deletes(x):
    y = x
    del y  # here
    return x


@refused(f"match is {AS_GRAPH}; write if and elif", V)
def matches(x):
    match x.shape:  # here
        case (3,):
            return x
    return -x


@refused(f"a class is {AS_GRAPH}; define it outside of the function", V)
def makes_a_class(x):
    class Pair: ...  # here

    return x


@refused(f"a set comprehension is {AS_GRAPH}; use a tuple or list", V)
def set_comprehension(x):
    return x + len({i % 2 for i in range(5)})  # here


@refused("index 5 is out of bounds for axis 0 of float32[3]; its indices go from -3 to 2", V)
def index_beyond(x):
    return x[5]  # here


@refused("index -4 is out of bounds for axis 1 of float32[1, 3]; its indices go from -3 to 2", V)
def one_of_the_indices_beyond(x):
    return x[None][0, [0, -4]]  # here


@refused("'s' is of type list before the loop in line {0} and of type list after an iteration; a list must be the", V)
def list_from_iteration_to_iteration(x):
    s = [x, x]
    for i in range(3):  # here
        s = [s[1], s[0] + s[1]]
    return s[0]


@refused("sorted of what only the graph knows is not supported; use NumPy's functions, such as np.sort", V)
def sorts(x):
    return sorted(x)[0]  # here


@refused("returns_nothing returns nothing as 'output'; return arrays or numbers", V)
def returns_nothing(x):  # here
    x + 1


@refused("the name 'i' is not defined; assign it before it is read", V)
def variable_of_a_comprehension(x):
    powers = [lambda y: y * i for i in range(3)]  # here
    return powers[0](x)


@refused(
    "the value is a function on one way of the if in line {0} and a function on the other; a function must be the", V
)
def chooses_a_function(x):
    change = (lambda y: y + 1) if x[0] > 0 else (lambda y: y)  # here
    return change(x)
