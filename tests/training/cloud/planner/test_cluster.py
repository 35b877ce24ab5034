"""Cluster files are read strictly, and exchanges cost what the papers' formulas say."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipel.errors import TrainingError
from archipel.training.cloud.planner import Cluster, read_cluster, write_cluster
from archipel.training.cloud.planner.cluster import all_reduce_seconds, all_to_all_seconds, gather_seconds

CLUSTER = Cluster(
    devices=4,
    memory_bytes=2**30,
    flops_per_second={"float32": 1e10, "bfloat16": 4e10},
    memory_bytes_per_second=1e9,
    link_bytes_per_second=1e8,
    latency_seconds=1e-3,
)


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster(CLUSTER, path)
    assert read_cluster(path) == CLUSTER


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("devices = 4", "devices = 0"), "above 0"),
        (("devices = 4", "devices = 4\nracks = 2"), "racks"),
        (("devices = 4", 'devices = "4"'), "devices"),
        (("latency_seconds = 0.001", "latency_seconds = nan"), "0 or more"),
        (("memory_bytes = 1073741824\n", ""), "memory_bytes"),
        (('"float32" =', '"float64" ='), "float32"),
        (("overlap = 0.0", "overlap = 2.0"), "overlap"),
        (("devices = 4", "devices = "), "line 1|Invalid"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster(CLUSTER, path)
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(TrainingError, match=message) as caught:
        read_cluster(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="No such file"):
        read_cluster(tmp_path / "none.toml")


def test_rings() -> None:
    # 8 MB over 4 devices at 100 MB/s: 2 * 3 steps of 2 MB and 1 ms each.
    assert all_reduce_seconds(CLUSTER, 8e6, 4) == pytest.approx(6 * (2e6 / 1e8 + 1e-3))
    assert gather_seconds(CLUSTER, 8e6, 4) == pytest.approx(3 * (2e6 / 1e8 + 1e-3))
    # Each device has 2 MB, and sends 0.5 MB to each of three others.
    assert all_to_all_seconds(CLUSTER, 8e6, 4) == pytest.approx(3 * (0.5e6 / 1e8 + 1e-3))
    assert all_reduce_seconds(CLUSTER, 8e6, 1) == 0
