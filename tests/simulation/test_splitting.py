"""Clients of whatever has examples: the same ones, whatever they lie in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from archipel.datasets import ArrayDataset, Subset, open_file, read_arrays, split_shards, write_records
from archipel.errors import DatasetError, SimulationError
from archipel.simulation import SplitClients, split_clients

X = np.random.default_rng(0).normal(size=(90, 3, 2)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 4, 90)
PARTS = split_shards(Y, 5)


def same(clients: SplitClients) -> None:
    assert len(clients) == 5
    for number, rows in enumerate(PARTS):
        taken = clients.take(number)
        np.testing.assert_array_equal(taken["input"], X[rows])
        np.testing.assert_array_equal(taken["label"], Y[rows])


def test_arrays_are_not_copied(tmp_path: Path) -> None:
    clients = split_clients((X, Y), PARTS)
    same(clients)
    assert clients.arrays["input"] is X
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert isinstance(split_clients((mapped, Y), PARTS).arrays["input"], np.memmap)


def test_a_subset_keeps_to_its_own_rows() -> None:
    backwards = Subset(ArrayDataset({"input": X[::-1], "label": Y[::-1]}), np.arange(90)[::-1])
    same(split_clients(backwards, PARTS))


def test_parquet_and_pytorch(tmp_path: Path) -> None:
    write_records((X, Y), tmp_path / "records.parquet", group_bytes=1000)
    for data in (open_file(tmp_path / "records.parquet"), TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))):
        np.testing.assert_array_equal(read_arrays(data, ["label"])["label"], Y)
        same(split_clients(data, PARTS))
    clients = split_clients(open_file(tmp_path / "records.parquet"), PARTS, folder=tmp_path / "mapped")
    same(clients)
    assert isinstance(clients.arrays["input"], np.memmap)


def test_what_cannot_be_divided_is_told(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no field 'colour'"):
        split_clients((X, Y), PARTS, fields=["colour"])
    with pytest.raises(SimulationError, match="not from 0 to 9"):
        split_clients((X[:10], Y[:10]), PARTS)
    with pytest.raises(DatasetError, match="no name for a file"):
        read_arrays({"../x": X}, folder=tmp_path)
