"""What rounds came to, and the weights that they made, as files: against a server over TCP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import read_weights
from tests.cli.federation.test_round import reached  # noqa: F401  (a fixture)
from tests.server.rounds.test_plain_rounds import mean, update
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.small_disk import small_disk, why_not
from tests.support.world import World

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def trained(archipel: Command, reached: World) -> tuple[str, dict[str, np.ndarray]]:  # noqa: F811
    """A task that has made its one version, and what is in that."""
    devices = reached.add_devices(3)
    task = reached.create_task(privacy="plain", threshold=None, cohort=3)
    reached.start_round(devices)
    updates = [update(index, 1.0 + index) for index in range(3)]
    for device, values in zip(devices, updates):
        device.updating(**values)
    reached.settle()
    return task["task_id"], mean(updates)


def same(file: Path, expected: dict[str, np.ndarray]) -> None:
    found = read_weights(file.read_bytes())
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6)


@pytest.mark.sampled(every=3)
def test_weights_of_a_task_and_of_a_version(
    archipel: Command, trained: tuple[str, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    task, expected = trained
    file = tmp_path / "task.safetensors"
    assert archipel("task", "download", task, str(file))[0] == f"{file}: {file.stat().st_size} bytes\n"
    same(file, expected)
    archipel("model", "create", "digits", "--population", "pupils")
    archipel("model", "register", "digits", "--task", task)
    archipel("model", "download", "digits", "1", str(tmp_path / "version.safetensors"))
    assert (tmp_path / "version.safetensors").read_bytes() == file.read_bytes()
    assert "exists already" in archipel("model", "download", "digits", "1", str(file), code=1)[1]
    assert "no version" in archipel("model", "download", "digits", "9", str(tmp_path / "x"), code=1)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["task.safetensors", "version.safetensors"]


@pytest.mark.sampled(every=3)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_full_disk_keeps_no_part_of_the_weights(
    archipel: Command, trained: tuple[str, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    # Of a disk of no files at all the temporary one has no name to show either.
    for number, (pages, files) in enumerate([(1, 1), (1, 0)]):
        with small_disk(tmp_path / f"disk-{number}", pages, files) as disk:
            # Leaves less than a page, which weights of 200 bytes need.
            (disk / "full").write_bytes(b"x" * 4096)
            file = disk / "task.safetensors"
            error = archipel("task", "download", trained[0], str(file), code=1)[1]
            assert error == f"archipel: {file}: No space left on device; free some space and run again\n"
            assert [path.name for path in disk.iterdir()] == ["full"]


@pytest.mark.sampled(every=3)
def test_weights_after_each_round(
    archipel: Command, trained: tuple[str, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    task, expected = trained
    folder = tmp_path / "versions"
    file = folder / "round-1.safetensors"
    assert archipel("task", "download", task, str(folder), "--rounds")[0] == f"{file}: {file.stat().st_size} bytes\n"
    same(file, expected)
    before = file.stat().st_mtime_ns
    assert archipel("task", "download", task, str(folder), "--rounds")[0] == ""
    assert [path.name for path in folder.iterdir()] == ["round-1.safetensors"]
    assert file.stat().st_mtime_ns == before


def test_a_version_that_is_a_bundle_as_it_is(
    archipel: Command,
    reached: World,  # noqa: F811
    tmp_path: Path,
) -> None:
    archipel("model", "create", "digits", "--population", "pupils")
    archipel("model", "register", "digits", "--bundle", str(reached.bundle_file))
    archipel("model", "download", "digits", "1", str(tmp_path / "again.bundle"))
    assert (tmp_path / "again.bundle").read_bytes() == reached.bundle_file.read_bytes()


@pytest.mark.sampled(every=3)
def test_other_bytes_than_those_asked_for_are_not_kept(
    archipel: Command,
    reached: World,  # noqa: F811
    trained: tuple[str, dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    digest = reached.task(trained[0])["model"]
    reached.damage(f"sha256/{digest[:2]}/{digest}")
    assert "the server sent other bytes" in archipel("task", "download", trained[0], str(tmp_path / "w"), code=1)[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled(every=3)
def test_what_rounds_came_to(archipel: Command, trained: tuple[str, dict[str, np.ndarray]]) -> None:
    head, row = archipel("task", "metrics", trained[0])[0].splitlines()
    assert head.split() == ["number", "round", "devices", "ended", "weight", "step", "clipped", "weights", "result"]
    assert (row.split()[0], row.split()[2], row.split()[5]) == ("1", "3", "6")  # weights 1, 2 and 3
    [found] = json.loads(archipel("task", "metrics", trained[0], "--json")[0])
    assert found["weight_sum"] == 6


@pytest.mark.parametrize("kind", [{"kind": "analytics"}, {"kind": "evaluation", "metrics": {"loss": 8.0}}])
def test_what_makes_no_weights_gives_none(
    archipel: Command,
    reached: World,  # noqa: F811
    tmp_path: Path,
    kind: dict[str, object],
) -> None:
    task = reached.create_task(**kind)["task_id"]
    said = archipel("task", "download", task, str(tmp_path / "w.safetensors"), code=1)[1]
    assert f"is of kind {kind['kind']} and makes no weights; `archipel task metrics {task}`" in said
    assert list(tmp_path.iterdir()) == []
