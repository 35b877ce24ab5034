"""Changes in place that another name would see, which have no graph; `# here` as in refused.py."""

from __future__ import annotations

import numpy as np

from tests.frontend.refused import V, refused


@refused("x += ... changes what the loop in line {-1} goes over too, which may be the same array; write x = x + ...", V)
def changes_what_it_goes_over(x):
    x = x * 2
    total = 0.0
    for v in x:
        x += 1  # here
        total = total + v
    return total


@refused("h += ... changes the items of 'found' too, which may be the same array; write h = h + ...", V)
def changes_the_items_of_a_list(x):
    found, h = [], x * 2
    for i in range(3):
        h += i  # here
        found.append(h)
    return np.stack(found)


@refused("h += ... changes the items of 'found' too, which may be the same array; write h = h + ...", V)
def changes_the_last_item_of_a_list(x):
    found, h = [], x * 2
    for i in range(3):
        found.append(h)
        h += i  # here
    return np.stack(found)


@refused("h += ... changes 'found' too, which may be the same array; write h = h + ...", V)
def changes_the_item_of_a_dict(x):
    h = x * 2
    found = {"h": h}
    h += 1  # here
    return found["h"] + h


@refused("y += ... changes 'z' too, which may be the same array; write y = y + ...", V)
def changes_a_view(x):
    y = x * 2
    z = np.flip(np.asarray(y))
    y += 1  # here
    return y + z


@refused("y[...] = ... changes 'z' too, which may be the same array; write y = y.copy()", V)
def changes_a_view_of_a_constant(x):
    y = np.zeros(4)
    z = y.reshape(2, 2)
    y[0] = 1  # here
    return z + x[0]


@refused(".fill changes the array in place; use the function of NumPy that gives a new one", V)
def fills(x):
    y = np.zeros(3)
    y.fill(2)  # here
    return x + y


@refused("np.exp with out= changes an array in place; assign what it returns", V)
def writes_into_another(x):
    y = np.zeros(3)
    np.exp(x, out=y)  # here
    return y


@refused("'found' is of type list; only items of arrays can be set; begin with np.zeros(size)", V)
def sets_an_item_of_a_list(x):
    found = [0.0, 0.0, 0.0]
    for i in range(3):
        found[i] = x[i]  # here
    return np.array(found)
