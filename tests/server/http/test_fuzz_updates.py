"""Updates and check-ins from outside: what is taken keeps its bounds, everything else is one kind of error."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from archipel.bundle.roles import Update
from archipel.errors import MessageError
from archipel.protocol.messages import CheckIn
from archipel.protocol.plain import decode_plain, plain_size
from archipel.protocol.vector import Layout, unpack
from tests.mutations import mutations
from tests.server.http.test_fuzz import CORPUS
from tests.support.tiny_bundle import DELTA_RANGE, WEIGHT_RANGE

CLIP, LOWEST = 100.0, 1 / 64
DELTA = {"dtype": "float32", "kind": "delta", "weighting": "examples", "range": DELTA_RANGE, "bits": 16, "clip": CLIP}
LAYOUT = Layout(
    (
        Update(name="w.update", tensor="w", shape=(3, 2), **DELTA),
        Update(name="b.update", tensor="b", shape=(2,), **DELTA),
        Update(
            name="weight", tensor="weight", shape=(), dtype="float32", kind="weight", weighting="examples",
            range=WEIGHT_RANGE, bits=16, lowest=LOWEST,
        ),
    )
)  # fmt: skip
FILES = sorted((CORPUS / "updates").glob("*.safetensors"))
CASES = [2_000, pytest.param(100_000, marks=pytest.mark.slow)]


def damaged(seeds: list[bytes], generator: random.Random) -> Iterator[bytes]:
    while True:
        data = bytearray(generator.choice(seeds))
        for _ in range(generator.randint(1, 4)):
            start = generator.randrange(len(data) + 1)
            stop = min(len(data), start + generator.choice((0, 0, 1, 4, 16)))
            data[start:stop] = generator.randbytes(generator.choice((0, 1, 4, stop - start)))
        yield bytes(data)


def taken(data: bytes) -> bool:
    """Decode, and check what came out with NumPy alone."""
    try:
        arrays = decode_plain(data, LAYOUT)
    except MessageError:
        return False
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "w.update": (np.float32, (3, 2)), "b.update": (np.float32, (2,)), "weight": (np.float32, ()),
    }  # fmt: skip
    values = np.concatenate([np.ravel(arrays[name]).astype(np.float64) for name in ("w.update", "b.update")])
    weight = float(arrays["weight"])
    assert np.isfinite(values).all()
    assert LOWEST * 0.999 <= weight <= WEIGHT_RANGE * 1.001
    assert np.linalg.norm(values) <= CLIP * weight * 1.001 + 1e-9
    assert np.abs(values).max() <= DELTA_RANGE * 1.001
    return True


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_of_the_corpus_only_the_good_one_is_taken(file: Path) -> None:
    data = file.read_bytes()
    assert taken(data) == (file.stem == "good")
    if file.stem == "good":
        assert len(data) == plain_size(LAYOUT)


@pytest.mark.parametrize("cases", CASES)
def test_no_update_breaks_the_decoder_or_its_bounds(cases: int) -> None:
    source = damaged([file.read_bytes() for file in FILES], random.Random(17))
    found = [taken(next(source)) for _ in range(cases)]
    assert 0 < sum(found) < cases  # both happen, or the cases are not worth much


@pytest.mark.parametrize("cases", CASES)
def test_masked_bytes_are_taken_by_their_length_alone(cases: int) -> None:
    generator = random.Random(18)
    for _ in range(cases):
        length, bits = generator.randint(0, 9), generator.choice((8, 16, 24, 32))
        data = generator.randbytes(generator.choice((length * bits // 8, generator.randint(0, 40))))
        if len(data) == length * bits // 8:
            vector = unpack(data, length, bits)
            assert vector.dtype == np.uint32
            assert [int.from_bytes(data[i : i + bits // 8], "little") for i in range(0, len(data), bits // 8)] == list(
                vector
            )
        else:
            with pytest.raises(MessageError):
                unpack(data, length, bits)


@pytest.mark.parametrize("cases", CASES)
def test_no_check_in_breaks_the_decoder(cases: int) -> None:
    decoder = msgspec.json.Decoder(CheckIn)
    source = mutations((CORPUS / "check_in.json").read_bytes(), random.Random(19))
    good = 0
    for _ in range(cases):
        try:
            decoded = decoder.decode(next(source))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # what the route answers with 400
            continue
        good += 1
        assert all(isinstance(value, str | float | bool) for value in decoded.attributes.values())
    assert 0 < good < cases
