"""Batches made in other processes: the same ones, errors by row, and a worker that dies is an error and no hang."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from archipel.datasets import ArrayDataset, Batches
from archipel.datasets.dataset import Arrays
from archipel.errors import DatasetError


class Fragile(ArrayDataset):
    """A data set that its reader does not survive at row 8, and that cannot read row 17."""

    def take(self, rows: np.ndarray) -> Arrays:
        if 8 in rows:
            os.kill(os.getpid(), signal.SIGKILL)
        if 17 in rows:
            raise ValueError("boom")
        return super().take(rows)


@pytest.mark.sampled(every=8)
def test_batches_of_other_processes() -> None:
    arrays = {"label": np.arange(20)}
    batches = Batches(ArrayDataset(arrays), 3, seed=1, workers=1, processes=True)
    expected = [batch["label"].tolist() for batch in Batches(ArrayDataset(arrays), 3, seed=1)]
    for _ in zip(range(2), batches):
        pass
    state = batches.state()
    assert [batch["label"].tolist() for batch in batches] == expected[2:]
    batches.restore(state)
    assert [batch["label"].tolist() for batch in batches] == expected[2:]
    batches.close()
    fragile = Batches(Fragile(arrays, name="here"), 1, shuffle=False, processes=True)
    fragile.restore({**fragile.state(), "batch": 15})
    with pytest.raises(DatasetError, match="here, row 17: ValueError: boom"):
        list(fragile)
    fragile.seek(0)
    seen: list[int] = []
    with pytest.raises(DatasetError, match="a worker process that makes batches died: killed"):
        seen.extend(int(batch["label"][0]) for batch in fragile)
    assert seen == list(range(len(seen)))
    assert len(seen) <= 8
    # What follows the example works again, with new processes.
    fragile.restore({**fragile.state(), "batch": 9})
    assert next(iter(fragile))["label"].tolist() == [9]
    fragile.close()


def test_what_cannot_be_sent() -> None:
    class Local(ArrayDataset):
        pass

    with pytest.raises(DatasetError, match=r"Local cannot be sent to worker processes .*; define its classes"):
        list(Batches(Local({"x": np.arange(4)}), 2, processes=True))
    with pytest.raises(DatasetError, match="processes make batches of a data set ahead"):
        Batches(ArrayDataset({"x": np.arange(4)}), 2, processes=True, prefetch=0)
