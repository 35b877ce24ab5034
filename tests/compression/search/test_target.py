"""Targets as text: what they mean, and where they are wrong. Expected values are written by hand."""

from __future__ import annotations

import dataclasses

import pytest

from archipel.compression.search import Metrics, parse_target
from archipel.errors import CompressionError

ORIGINAL = Metrics(
    nbytes=200_000, zipped=180_000, weights=50_000, flops=8_000_000, loss=0.1, accuracy=0.98, latency_us=400.0,
    latency_ratio=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "bound", "strict"),
    [
        ("size<100kB", 100_000, True),
        ("size <= 1.5 MB", 1_500_000, False),
        ("size<=100KiB", 102_400, False),
        ("size<2MiB", 2_097_152, True),
        ("size<512B", 512, True),
        ("size<50%", 100_000, True),
        ("size<=0.25x", 50_000, False),
        ("accuracy>=-0.5", 0.975, False),
        ("accuracy>0", 0.98, True),
        ("accuracy>=+1", 0.99, False),
        ("accuracy>=97.5%", 0.975, False),
        ("latency<250us", 250, True),
        ("latency<250µs", 250, True),
        ("latency<=1.5ms", 1500, False),
        ("latency<=0.5x", 0.5, False),
        ("latency<75%", 0.75, True),
        ("flops<50%", 4_000_000, True),
        ("flops<=3M", 3_000_000, False),
        ("flops<0.5G", 500_000_000, True),
        ("flops<900000FLOPs", 900_000, True),
    ],
)
def test_one_condition(text: str, bound: float, strict: bool) -> None:
    [condition] = parse_target(text).conditions
    assert condition.bound(ORIGINAL) == pytest.approx(bound)
    assert condition.strict is strict
    assert condition.quantity == text.split("<")[0].split(">")[0].strip()


def test_several_conditions_keep_their_words() -> None:
    target = parse_target(" size<100kB,accuracy >= -0.5 ,  latency<=0.5x, flops<50%")
    assert str(target) == "size<100kB, accuracy >= -0.5, latency<=0.5x, flops<50%"
    assert target.quantities == {"size", "accuracy", "latency", "flops"}


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("", 0, "expected size, accuracy, latency or flops"),
        ("speed<3", 0, "expected size, accuracy, latency or flops"),
        ("size<100kB, sice<3kB", 12, "expected size, accuracy"),
        ("size>100kB", 4, "expected <= or < after size"),
        ("size=100kB", 4, "expected <= or < after size"),
        ("accuracy<=98%", 8, "expected >= or > after accuracy"),
        ("size<", 5, "expected a number"),
        ("size<kB", 5, "expected a number"),
        ("size<100", 8, "expected a unit of size"),
        ("size<100GB", 8, "expected a unit of size"),
        ("size<100 kB flops<3M", 12, "expected a comma or the end"),
        ("size<100kB,", 11, "expected size, accuracy"),
        ("size<-3kB", 5, "above 0"),
        ("size<0kB", 5, "above 0"),
        ("size<1,5MB", 6, "expected a unit of size"),
        ("latency<=5", 10, "expected a unit of latency"),
        ("flops<3kB", 7, "expected a unit of flops"),
        ("accuracy>=98", 10, "expected a sign, or %"),
        ("accuracy>=-0.5%", 10, "from 0% to 100%"),
        ("accuracy>=101%", 10, "from 0% to 100%"),
        ("accuracy>=-0.5points", 14, "expected nothing"),
        ("size<1kB, flops<3M, size<2kB", 20, "size is there twice"),
    ],
)
def test_an_error_points_to_its_place(text: str, at: int, words: str) -> None:
    with pytest.raises(CompressionError) as error:
        parse_target(text)
    message, line, mark = str(error.value).split("\n")
    assert words in message
    assert line == f"  {text}"
    assert mark.index("^") - 2 == at


@pytest.mark.parametrize(
    ("text", "changes", "met"),
    [
        ("size<100kB", {"nbytes": 99_999}, True),
        ("size<100kB", {"nbytes": 100_000}, False),
        ("size<=100kB", {"nbytes": 100_000}, True),
        ("accuracy>=-0.5", {"accuracy": 0.975}, True),
        ("accuracy>=-0.5", {"accuracy": 0.9749}, False),
        ("accuracy>-0.5", {"accuracy": 0.975}, False),
        ("latency<=0.5x", {"latency_ratio": 0.5, "latency_us": 9999.0}, True),
        ("latency<=300us", {"latency_ratio": 0.1, "latency_us": 301.0}, False),
        ("size<50%, accuracy>=-0.5", {"nbytes": 99_000, "accuracy": 0.5}, False),
    ],
)
def test_met(text: str, changes: dict[str, float], met: bool) -> None:
    found = dataclasses.replace(ORIGINAL, **changes)  # type: ignore[arg-type]
    target = parse_target(text)
    assert target.met(found, ORIGINAL) is met
    assert (target.distance(found, ORIGINAL) == 0) is met
    assert bool(target.missed(found, ORIGINAL)) is not met


def test_distance_is_what_is_missing() -> None:
    """20 % too many bytes, and 1 point of accuracy, which counts as 10 %."""
    found = dataclasses.replace(ORIGINAL, nbytes=120_000, accuracy=0.965)
    assert parse_target("size<=100kB, accuracy>=-0.5").distance(found, ORIGINAL) == pytest.approx(0.2 + 0.1)


def test_accuracy_of_a_regression_is_an_error() -> None:
    original = dataclasses.replace(ORIGINAL, accuracy=None)
    with pytest.raises(CompressionError, match="has no accuracy"):
        parse_target("accuracy>=-0.5").met(original, original)
