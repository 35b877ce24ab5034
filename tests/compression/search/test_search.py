from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from archipel.compression import StaticInt8, compress, load_recipe
from archipel.compression.search import SearchProgress, SearchResult, Space, search
from archipel.errors import CompressionError
from tests.support.digits import Digits

TRIALS = 4
TARGET = "size<20kB, accuracy>=-5"
# Two forms of numbers and all that can be trained after them: points of half a second.
FORMS = {"int8": StaticInt8(examples=64), "int8 per tensor": StaticInt8(examples=64, per_channel=False)}
SPACE = Space(FORMS, {}, training=True)

SCRIPT = """
import sys
import numpy as np
from archipel.compression import StaticInt8
from archipel.compression.search import Space, search
from archipel.graph import Model

folder = sys.argv[1]
load = lambda name: dict(np.load(f"{folder}/{name}.npz"))
search(Model.from_onnx(f"{folder}/model.onnx"), sys.argv[3], load("train"), None, load("validation"),
       folder=sys.argv[2], trials=int(sys.argv[4]), space=eval(sys.argv[5]), on_progress=lambda p: print(p, flush=True))
"""


def run(digits: Digits, folder: Path, **options: Any) -> SearchResult:
    return search(digits.model, TARGET, digits.train, None, digits.validation, folder=folder, space=SPACE, **options)


@pytest.fixture(scope="module")
def found(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return run(digits, tmp_path_factory.mktemp("search") / "work", trials=TRIALS)


def accuracy(path: Path, data: dict[str, np.ndarray]) -> float:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return float((session.run(None, {"x": data["x"]})[0].argmax(1) == data["label"]).mean())


@pytest.mark.sampled(every=8)
def test_points_are_what_their_folders_hold(digits: Digits, found: SearchResult) -> None:
    assert [point.number for point in found.points] == list(range(1, len(found.points) + 1))
    assert len(found.points) + len(found.failed) >= TRIALS - 1  # one trial may be the original itself
    for point in found.points:
        model = point.folder / "model.onnx"
        assert model.stat().st_size == point.metrics.nbytes
        assert point.metrics.accuracy == pytest.approx(accuracy(model, digits.validation))
        assert tuple(load_recipe(point.folder / "recipe.toml")) == point.recipe
        content = json.loads((point.folder / "metrics.json").read_text())
        assert content["seed"] == found.seed
        assert content["metrics"] == dataclasses.asdict(point.metrics)
        assert point.metrics.latency_us > 0
    assert found.original.accuracy == pytest.approx(accuracy(digits.folder / "model.onnx", digits.validation))


@pytest.mark.sampled(every=4)
def test_best_and_fronts(found: SearchResult) -> None:
    original = found.original.accuracy or 0
    meeting = [p for p in found.points if p.metrics.nbytes < 20_000 and p.metrics.accuracy >= original - 0.05 - 1e-9]
    assert list(found.meeting) == meeting
    assert meeting
    assert found.best is not None
    assert found.best.metrics.accuracy == max(p.metrics.accuracy or 0 for p in meeting)
    assert found.nearest == found.best
    front = found.front("size")
    for point in found.points:
        beaten = any(
            q.metrics.nbytes <= point.metrics.nbytes and q.metrics.quality >= point.metrics.quality
            for q in found.points if q is not point
        )  # fmt: skip
        assert (point in front) or beaten
    costs = [(p.metrics.nbytes, p.metrics.quality) for p in front]
    assert costs == sorted(costs)
    assert f"point {found.best.number} meets" in found.verdict()


@pytest.mark.sampled(every=6)
def test_a_point_is_made_again_byte_for_byte(digits: Digits, found: SearchResult, tmp_path: Path) -> None:
    trained = next(p for p in found.points if "FineTune" in p.title)
    for point in (found.points[0], trained):
        again, report = compress(
            digits.model, load_recipe(point.folder / "recipe.toml"), digits.train, validation=digits.validation,
            seed=point.seed,
        )  # fmt: skip
        again.save(tmp_path / "again.onnx")
        assert (tmp_path / "again.onnx").read_bytes() == (point.folder / "model.onnx").read_bytes()
        assert report.after.accuracy == point.metrics.accuracy


@pytest.mark.sampled(every=3)
def test_the_same_search_again_makes_nothing_anew(digits: Digits, found: SearchResult) -> None:
    files = {path: path.stat().st_mtime_ns for path in (found.folder / "points").rglob("*")}
    again = run(digits, found.folder, trials=TRIALS)
    assert again == found
    assert files == {path: path.stat().st_mtime_ns for path in (found.folder / "points").rglob("*")}


def test_another_target_uses_the_points_that_are_there(digits: Digits, found: SearchResult) -> None:
    again = search(digits.model, "size<100B, latency<100x", digits.train, None, digits.validation,
                   folder=found.folder, trials=TRIALS, space=SPACE)  # fmt: skip
    assert again.points == found.points
    assert again.best is None
    assert again.nearest is not None
    assert again.nearest.metrics.nbytes == min(p.metrics.nbytes for p in again.points)
    assert "no point meets" in again.verdict()
    assert "misses size<100B" in again.verdict()


@pytest.mark.slow
def test_killed_and_resumed_it_tries_the_same(digits: Digits, found: SearchResult, tmp_path: Path) -> None:
    """SIGKILL in the middle of the training of a point, after others were made."""
    victim = next(p.number for p in found.points if "FineTune" in p.title)
    arguments = [str(digits.folder), str(tmp_path / "work"), TARGET, str(TRIALS), repr(SPACE)]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    before = (tmp_path / "work/points") / f"{victim - 1:03d}"
    for line in process.stdout:
        if ("fine-tuning" in line or "training" in line) and before.exists():
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "work/points" / f"{victim:03d}").exists()
    resumed = run(digits, tmp_path / "work", trials=TRIALS)
    assert [(p.number, p.recipe) for p in resumed.points] == [(p.number, p.recipe) for p in found.points]
    for mine, other in zip(resumed.points, found.points):
        assert (mine.folder / "model.onnx").read_bytes() == (other.folder / "model.onnx").read_bytes()
    assert not list((tmp_path / "work").glob("running-*"))


@pytest.mark.sampled(every=8)
def test_progress_can_stop_it(digits: Digits, tmp_path: Path) -> None:
    seen: list[SearchProgress] = []

    def stop(progress: SearchProgress) -> None:
        seen.append(progress)
        if progress.trial == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(digits, tmp_path / "work", trials=3, on_progress=stop)
    assert [p.name for p in (tmp_path / "work/points").iterdir()] == ["001"]
    assert seen[-1].trials == 3
    assert len(run(digits, tmp_path / "work", trials=1000, minutes=1e-5).points) <= 2


def test_errors_say_what_to_do(digits: Digits, found: SearchResult, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match="needs validation data"):
        search(digits.model, TARGET, digits.train, folder=tmp_path / "a")
    with pytest.raises(CompressionError, match="the space has fine-tuning"):
        search(digits.model, TARGET, None, None, digits.validation, folder=tmp_path / "a", space=SPACE)
    with pytest.raises(CompressionError, match="target: expected a unit"):
        search(digits.model, "size<3", digits.train, None, digits.validation, folder=tmp_path / "a")
    with pytest.raises(CompressionError, match="another model, seed, data"):
        run(digits, found.folder, trials=1, seed=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("")
    with pytest.raises(CompressionError, match="neither empty nor the folder of a search"):
        run(digits, tmp_path / "full")
    shutil.copytree(found.folder, tmp_path / "damaged")
    shutil.rmtree(tmp_path / "damaged/points/001")
    with pytest.raises(CompressionError, match="point 1 is gone"):
        run(digits, tmp_path / "damaged")
    shutil.rmtree(tmp_path / "damaged")
    shutil.copytree(found.folder, tmp_path / "damaged")
    (tmp_path / "damaged/trials.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(CompressionError, match="not the trials of a search"):
        run(digits, tmp_path / "damaged")
