"""Batches: every example once an epoch, shared without loss, resumed exactly, errors by row, no thread left behind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import ArrayDataset, Batches, Field, Labelled, Subset, as_dataset
from archipel.datasets.dataset import Arrays
from archipel.errors import DatasetError


def numbered(count: int) -> ArrayDataset:
    return ArrayDataset({"input": np.arange(count, dtype=np.float32)[:, None], "label": np.arange(count)})


class InBlocks(ArrayDataset):
    """Rows whose blocks are of different sizes, of which it says that it can hold four."""

    window = 4

    def __init__(self, count: int) -> None:
        super().__init__({"label": np.arange(count)})
        self.blocks = np.unique([0, *range(0, count, 7), *range(3, count, 11), count])


class Counting:
    """A stream of `count` examples in pieces of different sizes, which skips by itself."""

    fields = {"label": Field(np.dtype(np.int64))}

    def __init__(self, count: int) -> None:
        self.count, self.given = count, 0

    def read(self, start: int = 0) -> Iterator[Arrays]:
        while start < self.count:
            size = min(1 + start % 5, self.count - start)
            self.given += size
            yield {"label": np.arange(start, start + size)}
            start += size


KINDS = {"arrays": numbered, "blocks": InBlocks, "stream": Counting}


def labels(batches: Batches) -> list[list[int]]:
    return [batch["label"].tolist() for batch in batches]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    count=st.integers(1, 60),
    size=st.integers(1, 9),
    world=st.integers(1, 4),
    shuffle=st.booleans(),
    pad=st.booleans(),
    drop_last=st.booleans(),
    prefetch=st.sampled_from([0, 3]),
)
def test_an_epoch_has_every_example_once(
    kind: str, count: int, size: int, world: int, shuffle: bool, pad: bool, drop_last: bool, prefetch: int
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "pad": pad, "drop_last": drop_last, "prefetch": prefetch}
    whole = count - count % (size * world) if drop_last else count
    if not whole and kind != "stream":
        with pytest.raises(DatasetError, match=f"{count} examples fill no batch"):
            Batches(KINDS[kind](count), size, world=world, **options)
        return
    parts = [
        labels(Batches(KINDS[kind](count), size, rank=rank, world=world, seed=3, buffer=13, **options))
        for rank in range(world)
    ]
    assert len({len(part) for part in parts}) == 1  # as many steps in each process
    seen = [label for part in parts for batch in part for label in batch]
    extra = (-(whole % (size * world))) % world if pad else 0
    assert len(seen) == whole + extra
    assert len(set(seen)) == whole
    assert set(seen) <= set(range(count))
    if pad:
        assert all(len({len(part[step]) for part in parts}) == 1 for step in range(len(parts[0])))
    # A step of all processes together is a batch of one process with as many examples.
    alone = labels(Batches(KINDS[kind](count), size * world, seed=3, buffer=13, **options))
    together = [[label for part in parts for label in part[step]] for step in range(len(parts[0]))]
    assert [step[: len(one)] for step, one in zip(together, alone, strict=True)] == alone
    if kind != "stream":
        batches = Batches(KINDS[kind](count), size, world=world, **options)
        assert len(batches) == len(parts[0])
        assert batches.padding == extra
    if not shuffle:
        assert [label for step in alone for label in step] == list(range(whole))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(count=st.integers(1, 50), size=st.integers(1, 8), steps=st.integers(0, 40), prefetch=st.sampled_from([0, 2]))
def test_a_state_continues_with_the_next_batch(kind: str, count: int, size: int, steps: int, prefetch: int) -> None:
    def run(batches: Batches, most: int) -> list[tuple[int, list[int]]]:
        seen: list[tuple[int, list[int]]] = []
        while len(seen) < most:
            for batch in batches:
                seen.append((batches.epoch, batch["label"].tolist()))
                if len(seen) == most:
                    break
        return seen

    def fresh() -> Batches:
        return Batches(KINDS[kind](count), size, seed=9, buffer=11, prefetch=prefetch)

    through, first, second = fresh(), fresh(), fresh()
    expected = run(through, steps + 15)
    begun = run(first, steps)
    second.restore(json.loads(json.dumps(first.state())))
    assert begun + run(second, 15) == expected
    # The iteration that was left continues, too.
    assert run(first, 15) == expected[steps:]


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_and_seeds_have_orders_of_their_own(kind: str) -> None:
    batches = Batches(KINDS[kind](50), 50, seed=1, buffer=20)
    orders = [labels(batches)[0] for _ in range(3)] + labels(Batches(KINDS[kind](50), 50, seed=2, buffer=20))
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    # Neither do the pieces of an epoch go alike.
    assert len({tuple(np.argsort(orders[0][start : start + 10]).tolist()) for start in range(0, 50, 10)}) == 5
    batches.seek(1)
    assert labels(batches)[0] == orders[1]
    assert batches.epoch == 2


def test_more_processes_may_continue_with_steps_of_the_same_size() -> None:
    one = Batches(numbered(40), 8, seed=5)
    for _ in zip(range(2), one):
        pass
    two = [Batches(numbered(40), 4, seed=5, rank=rank, world=2) for rank in range(2)]
    for batches in two:
        batches.restore(one.state())
    assert [a + b for a, b in zip(*map(labels, two), strict=True)] == labels(one)


def test_blocks_are_read_some_at_a_time() -> None:
    data = InBlocks(200)
    batch_blocks = [
        len(set(np.searchsorted(data.blocks, np.array(batch), side="right"))) for batch in labels(Batches(data, 4))
    ]
    # Half of what it holds, or at the border between two windows all of it.
    assert max(batch_blocks) <= 4


def test_a_stream_is_skipped_to_the_place() -> None:
    stream = Counting(10_000)
    batches = Batches(stream, 10, buffer=100)
    batches.restore({**batches.state(), "batch": 900})
    next(iter(batches))
    assert stream.given < 500


def test_a_state_of_other_data_or_settings_is_refused() -> None:
    state = Batches(numbered(40), 8, seed=5).state()
    for other in (Batches(numbered(40), 8, seed=6), Batches(numbered(41), 8, seed=5), Batches(numbered(40), 4, seed=5)):
        with pytest.raises(DatasetError, match=r"the state was taken with .* now it is"):
            other.restore(state)
    batches = Batches(numbered(40), 8, seed=5)
    for damage in ({"batch": 6}, {"batch": -1}, {"batch": 1.0}, {"epoch": None}, {"version": 2}, {"epoch": True}):
        with pytest.raises(DatasetError, match=r"damaged|another version"):
            batches.restore({**state, **damage})
    with pytest.raises(DatasetError, match="not a state"):
        batches.restore([])  # type: ignore[arg-type]


class Breaking(ArrayDataset):
    """A data set whose row 33 cannot be read, by an error of its own that says nothing."""

    def take(self, rows: np.ndarray) -> Arrays:
        if 33 in rows:
            raise ValueError("boom")
        return super().take(rows)


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 1), (2, 1), (4, 3)])
def test_an_error_names_the_row_and_leaves_no_thread(prefetch: int, workers: int) -> None:
    before = threading.active_count()
    data = Breaking({"label": np.arange(40)}, name="here")
    batches = Batches(Subset(data, range(39, -1, -1)), 4, shuffle=False, prefetch=prefetch, workers=workers)
    seen = []
    with pytest.raises(DatasetError, match="here, row 33: ValueError: boom; mend it or leave it out"):
        seen.extend(batch["label"].tolist() for batch in batches)
    assert seen == [[39, 38, 37, 36]]
    assert batches.state()["batch"] == 1
    assert threading.active_count() == before


def test_leaving_early_ends_the_threads() -> None:
    before = threading.active_count()
    for _ in Batches(numbered(1000), 2, prefetch=4, workers=3):
        break
    assert threading.active_count() == before


class Slow(ArrayDataset):
    """Notes in which threads it was read, and how far reading is ahead of the caller."""

    most = asked = 0

    def take(self, rows: np.ndarray) -> Arrays:
        self.most = max(self.most, int(rows[-1]) - self.asked)
        time.sleep(0.001 * (5 - rows[0] % 5))
        return super().take(rows)


def test_workers_keep_the_order_and_stay_near() -> None:
    data = Slow({"label": np.arange(40)})
    seen = []
    for batch in Batches(data, 1, shuffle=False, prefetch=3, workers=3):
        data.asked = int(batch["label"][0])
        seen.append(data.asked)
    assert seen == list(range(40))
    assert 2 <= data.most <= 4


def test_a_data_set_that_gives_something_else_is_named() -> None:
    class Lying(ArrayDataset):
        def take(self, rows: np.ndarray) -> Arrays:
            return {"label": super().take(rows)["label"].astype(np.int32)}

    with pytest.raises(DatasetError, match=r"row 0 and others: field 'label' is int64\[\] .* gave int32\[2\]"):
        labels(Batches(Lying({"label": np.arange(4)}), 2, shuffle=False))


def test_two_iterations_at_once_are_refused() -> None:
    batches = Batches(numbered(40), 2)
    first, second = iter(batches), iter(batches)
    next(first)
    next(second)
    with pytest.raises(DatasetError, match="another iteration"):
        next(first)


def test_what_becomes_a_data_set() -> None:
    x, y = np.ones((3, 2), ">f4"), [1, 0, 1]
    for data in ((x, y), {"input": x, "label": y}, ArrayDataset({"input": x, "label": y})):
        made = as_dataset(data)
        assert {name: str(field) for name, field in made.fields.items()} == {"input": "float32[2]", "label": "int64[]"}
        assert next(iter(Batches(made, 3)))["input"].dtype == np.float32
    assert list(as_dataset(Labelled(np.ones((3, 2), np.float32), np.arange(3))).fields) == ["input", "label"]
    for wrong, message in (
        ({}, "no arrays"),
        ({"a": [1], "b": [1, 2]}, r"different numbers of examples \(a 1, b 2\)"),
        ({"a": ["x"]}, "expected numbers or bools"),
        ({"a": 1}, "single number"),
        ({"": [1]}, "not empty"),
        (7, "got int"),
    ):
        with pytest.raises(DatasetError, match=message):
            as_dataset(wrong)
    with pytest.raises(DatasetError, match=r"rows 0\.\.3 of a data set of 3"):
        Subset(numbered(3), [0, 3])
    for options, message in (
        ({"rank": 1}, r"rank must be 0\.\.0 in a world of 1, got 1"),
        ({"seed": 2**32}, "seed must be"),
        ({"batch_size": 2.0}, r"batch_size must be a whole number from 1 on, got 2\.0"),
        ({"prefetch": -1}, "prefetch must be a whole number from 0 on"),
    ):
        with pytest.raises(DatasetError, match=message):
            Batches(numbered(3), **{"batch_size": 1, **options})
    assert json.dumps(Batches(numbered(3), np.int64(1), seed=np.uint32(7)).state())
