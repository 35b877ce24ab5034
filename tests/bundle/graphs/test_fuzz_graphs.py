"""Any bytes: UnsafeGraphError or a pass, soon; and what passes reads as the ONNX package reads it.

What was found once is kept in corpus/ and tried first; the good graphs of web/tests/graphs/ are what is changed.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from archipel.bundle.graphs import inspect_graph
from archipel.errors import UnsafeGraphError

GRAPHS = Path(__file__).resolve().parents[3] / "web" / "tests" / "graphs"
CORPUS = Path(__file__).parent / "corpus"
INDEX = json.loads((GRAPHS / "graphs.json").read_text())
GOOD = sorted(name for name, error in INDEX["graphs"].items() if error is None)
WEIGHTS = ("weights.safetensors", INDEX["weights"])


def inspect(data: bytes) -> None:
    """Passes or is refused; what passes is what onnx reads, and every location that onnx finds is the weights file."""
    start = time.monotonic()
    try:
        inspect_graph("p", data, WEIGHTS)
    except UnsafeGraphError:
        return
    finally:
        assert time.monotonic() - start < 5
    try:
        model = onnx.load_from_string(data)
    except DecodeError:
        return  # the official library takes even less
    assert all(location == "weights.safetensors" for location in locations(model)), data.hex()
    assert not model.training_info
    assert all(node.domain in ("", *(f.domain for f in model.functions)) for node in model.graph.node)


def locations(message: object) -> list[str]:
    """Every external location anywhere in a message, found through protobuf's own description of it."""
    found: list[str] = []
    if isinstance(message, onnx.TensorProto):
        found += [entry.value for entry in message.external_data if entry.key == "location"]
    for field, value in message.ListFields():  # type: ignore[attr-defined]
        if field.message_type is not None:
            for each in value if hasattr(value, "__len__") and not hasattr(value, "ListFields") else [value]:
                found += locations(each)
    return found


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()) if CORPUS.is_dir() else [], ids=lambda path: path.name)
def test_what_was_found_before(path: Path) -> None:
    inspect(path.read_bytes())


@given(st.binary(max_size=200))
@example(b"")
@settings(max_examples=400)
@pytest.mark.sampled(every=4)
def test_any_bytes(data: bytes) -> None:
    inspect(data)


@pytest.mark.sampled(every=3)
@given(st.sampled_from(GOOD), st.randoms(use_true_random=False))
@settings(max_examples=1500)
def test_changed_graphs(name: str, rng: random.Random) -> None:
    inspect(changed((GRAPHS / f"{name}.onnx").read_bytes(), rng))


def changed(data: bytes, rng: random.Random) -> bytes:
    """A few bytes set, a piece cut out, doubled, or taken from elsewhere in the file."""
    broken = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at, size = rng.randrange(len(broken) + 1), rng.choice([1, 1, 2, 4, 8, 24])
        match rng.randrange(5):
            case 0 if at < len(broken):
                broken[at] ^= 1 << rng.randrange(8)
            case 1:
                del broken[at : at + size]
            case 2:
                broken[at:at] = broken[at : at + size]
            case 3:
                other = rng.randrange(len(broken) + 1)
                broken[at:at] = broken[other : other + size]
            case _:
                broken[at : at + size] = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * size
    return bytes(broken)
