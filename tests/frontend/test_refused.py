"""What has no graph is named, with its place and a remedy."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import archipel
from archipel.errors import FunctionError, GraphError
from tests.frontend import refused, refused_in_place, refused_syntax
from tests.frontend.refused import REFUSED, Refused

LINES = {
    module.__name__.rpartition(".")[2]: Path(module.__file__).read_text().splitlines()
    for module in (refused, refused_in_place, refused_syntax)
}


@pytest.mark.parametrize("case", REFUSED, ids=[c.function.__name__ for c in REFUSED])
def test_error_names_the_place(case: Refused) -> None:
    with pytest.raises(FunctionError) as caught:
        archipel.function(case.function, case.arguments)
    error = caught.value
    inner = case.function.__name__ == "error_in_a_call"
    first = inspect.getsourcelines(refused._inner if inner else case.function)[1]
    module = case.function.__module__.rpartition(".")[2]
    lines = LINES[module]
    line = next(number for number in range(first, len(lines) + 1) if "# here" in lines[number - 1])
    place, text, source = re.fullmatch(r"(\S+): (.*)\n    (.*)", str(error), re.DOTALL).groups()
    assert place == f"tests/frontend/{module}.py:{error.line}:{error.column}"
    assert (error.line, source) == (line, lines[line - 1].strip())
    assert error.column - 1 >= len(lines[line - 1]) - len(lines[line - 1].lstrip())
    expected = re.sub(r"\{(-?\d+)\}", lambda m: str(line + int(m[1])), case.text)
    assert text.startswith(expected), f"{text}\n{expected}"


def test_columns() -> None:
    def two(x):
        return np.exp(x) + np.cbrt(x) + np.cbrt(x * 2)

    with pytest.raises(FunctionError) as caught:
        archipel.function(two, (np.ones(3),))
    code = LINES_HERE[caught.value.line - 1]
    assert code[caught.value.column - 1 :].startswith("np.cbrt(x) + ")


LINES_HERE = Path(__file__).read_text().splitlines()


def test_functions_without_source() -> None:
    space: dict = {}
    exec("def f(x): return x", space)
    with pytest.raises(FunctionError, match=r"f: its source text cannot be read .*; define it in a file or a notebook"):
        archipel.function(space["f"], (np.ones(3),))
    with pytest.raises(FunctionError, match=r"<built-in function len> is not a Python function: wrap it in one"):
        archipel.function(len, (np.ones(3),))


def test_example_arguments() -> None:
    def f(x, y):
        return x + y

    x = np.ones(3)
    for arguments, text in (
        ((x,), "f: example_args do not fit its parameters: missing a required argument: 'y'"),
        ((x, x, x), "f: example_args do not fit its parameters: too many positional arguments"),
        ((x, np.ones(3, np.float16)), "f: the example of 'y' is of type float16; supported: bool, float32"),
        ((x, [x, x]), "f: the example of 'y' is list; give an array, a number or a dict of weights"),
    ):
        with pytest.raises(FunctionError, match=re.escape(text)):
            archipel.function(f, arguments)
    with pytest.raises(FunctionError, match="symbolic= names 'z', which is no input"):
        archipel.function(f, (x, x), symbolic={"z": {0: "n"}})
    with pytest.raises(FunctionError, match="symbolic= names axis 1 of 'x', an array with 1 axes"):
        archipel.function(f, (x, x), symbolic={"x": {1: "n"}})
    assert issubclass(FunctionError, GraphError)


def test_what_is_returned() -> None:
    x = np.ones(3)
    with pytest.raises(FunctionError, match="returns nothing as 'output'; return arrays or numbers"):
        archipel.function(lambda x: None, (x,))
    with pytest.raises(FunctionError, match="returns str as 'output_1'"):
        archipel.function(lambda x: (x, "text"), (x,))
    with pytest.raises(FunctionError, match="an input or weight is called 'output' like an output; give it another"):
        archipel.function(lambda output: output, (x,))
