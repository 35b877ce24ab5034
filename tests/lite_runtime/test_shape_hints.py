"""What data of a wrong shape are told to do, done as it says, gives data of the right shape."""

from __future__ import annotations

import re

import numpy as np
import pytest

from archipel.bundle.roles import Example
from archipel.errors import RuntimeInputError
from archipel.lite_runtime.fields import check_array


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        (("n", 3), (3,)),
        (("n", 1, 8, 8), (20, 8, 8)),
        (("n", 1, 8, 8), (1, 8, 8)),
        (("n", 1), (20,)),
        (("n", 3, 16, 8), (20, 16, 8, 3)),
        (("n", 6, "time"), (6, 64)),
    ],
)
def test_a_hint_is_right(wanted: tuple[int | str, ...], given: tuple[int, ...]) -> None:
    port, x = Example(name="x", dtype="float32", shape=wanted), np.zeros(given, np.float32)
    with pytest.raises(RuntimeInputError) as raised:
        check_array("fit", port, x, free_batch=True)
    (advice,) = re.findall(r" with (.*)$", str(raised.value))
    check_array("fit", port, eval(advice, {"numpy": np, "x": x}), free_batch=True)


@pytest.mark.parametrize("given", [(20, 7, 8), (20, 2, 8, 8), (20, 1, 7, 8), (20, 64)])
def test_no_hint_where_nothing_simple_helps(given: tuple[int, ...]) -> None:
    port = Example(name="x", dtype="float32", shape=("n", 1, 8, 8))
    with pytest.raises(RuntimeInputError, match=r"got float32\[[^;]*$"):
        check_array("fit", port, np.zeros(given, np.float32), free_batch=True)
