"""A publisher's graph never ends, takes ever more memory, or computes with values that are nowhere.

The attacker holds the release key of a fleet and wants its devices busy or dead. No inspection can tell whether a loop
ends. What stops it: an isolated child has limits of time, processor time and memory, and is ended beyond them; ONNX
Runtime refuses a body that reads a value that no graph around it has, and that is an error like any other.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from archipel.bundle import generate_key
from archipel.errors import RuntimeLimitError, RuntimeProgramError
from archipel.lite_runtime import load
from tests.attacks.sandbox_bundles import public, signed

X = np.zeros(3, np.float32)
START = """<ir_version: 10, opset_import: ["": 21]> look (float[n] x) => (float[64] u) {
    most = Constant <value = int64 {9223372036854775807}> () \n yes = Constant <value = bool {1}> ()
    zero = Constant <value_float = 0.0> () \n size = Constant <value_ints = [64]> ()
    one = Constant <value_ints = [1]> () \n first = Reshape (zero, one)
"""
ENDLESS = """ last = Loop (most, yes, zero) <body = turn (int64 i, bool c, float a) => (bool d, float b) {
        d = Identity(c) \n more = Constant <value_float = 1.0> () \n b = Add(a, more)
    }> \n u = Expand (last, size) }"""
GROWING = """ last = Loop (most, yes, first) <body = turn (int64 i, bool c, float[k] a) => (bool d, float[m] b) {
        d = Identity(c) \n b = Concat <axis = 0> (a, a)
    }> \n end = ReduceMax <keepdims = 0> (last) \n u = Expand (end, size) }"""
NOWHERE = """ last = Loop (most, yes, zero) <body = turn (int64 i, bool c, float a) => (bool d, float b) {
        d = Identity(c) \n b = Add(a, of_nobody)
    }> \n u = Expand (last, size) }"""


def bundle(folder: Path, rest: str) -> tuple[Path, list[bytes]]:
    key = generate_key()
    return signed(folder / "b", key, onnx.parser.parse_model(START + rest)), public(key)


@pytest.mark.parametrize(
    ("rest", "limit", "text"),
    [
        (ENDLESS, {"seconds": 1.0}, "analyze: no answer within the 1 seconds"),
        (ENDLESS, {"cpu_seconds": 0.5}, "analyze: more than the 0.5 seconds of CPU time"),
        (GROWING, {"memory_limit": 64 << 20}, "analyze: .*67108864 bytes"),
    ],
)
@pytest.mark.sampled(every=4)
def test_a_loop_without_end(tmp_path: Path, rest: str, limit: dict[str, float], text: str) -> None:
    folder, keys = bundle(tmp_path, rest)
    with load(folder, keys, isolated=True, **limit) as runtime:
        start = time.monotonic()
        with pytest.raises(RuntimeLimitError, match=text):
            runtime.analyze(X)
        assert time.monotonic() - start < 30


def test_a_body_that_reads_what_nobody_has(tmp_path: Path) -> None:
    folder, keys = bundle(tmp_path, NOWHERE)
    with pytest.raises(RuntimeProgramError, match=r"program 'look' cannot be loaded: .*of_nobody"):
        load(folder, keys).analyze(X)
