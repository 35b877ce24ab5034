"""Runs as tensorboardX, trainings and simulations write them."""

from __future__ import annotations

import csv
import json
import struct
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX import SummaryWriter

from archipel.bundle import write_weights
from archipel.errors import InsightError
from archipel.insight import is_run, read_run, read_versions, weight_histograms
from archipel.simulation.rounds import RoundRow, RoundSettings
from archipel.simulation.saved import Record
from archipel.training.cloud.result import Epoch, _plain


def test_event_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(2, 3, 5000)
    losses = {step: float(np.float32(1 / (step + 1))) for step in range(30)}
    for name in ("one", "two"):
        with SummaryWriter(str(tmp_path / name)) as writer:
            for step, value in losses.items():
                writer.add_scalar("train/loss", value, step)
                writer.add_scalar("validation/loss", value + 1, step)
            writer.add_histogram("conv.weight", numbers, 7)
    assert is_run(tmp_path)
    run = read_run(tmp_path)
    assert {(curve.name, curve.run, curve.group) for curve in run.curves} == {
        (f"{kind}/loss", name, "loss") for kind in ("train", "validation") for name in ("one", "two")
    }
    curve = next(curve for curve in run.curves if curve.name == "train/loss")
    assert dict(zip(curve.steps, curve.values)) == losses
    series = run.histograms[0]
    assert (series.name, series.steps[0].label) == ("one: conv.weight", "7")
    found = series.steps[0].statistics
    np.testing.assert_allclose([found.mean, found.deviation], [numbers.mean(), numbers.std()], rtol=1e-6)
    assert (found.low, found.high, found.count) == (numbers.min(), numbers.max(), 5000)
    # The log's own buckets are coarse, so a bin may have some more or fewer than NumPy counts.
    counts = np.histogram(numbers, 40)[0]
    assert abs(np.array(found.counts) - counts).sum() < 0.15 * 5000
    assert abs(sum(found.counts) - 5000) <= 20


def test_a_log_that_is_written_now(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(5):
            writer.add_scalar("loss", step, step)
    [file] = tmp_path.glob("*tfevents*")
    file.write_bytes(file.read_bytes()[:-3])
    run = read_run(tmp_path)
    assert run.curves[0].steps == [0, 1, 2, 3]
    assert "last record is not complete" in run.notes[0]


@settings(max_examples=60)
@given(st.binary(max_size=200), st.integers(0, 300))
@pytest.mark.sampled(every=6)
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    folder = tmp_path_factory.mktemp("log")
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("loss", 1.0, 1)
    [file] = folder.glob("*tfevents*")
    good = file.read_bytes()
    file.write_bytes(good[:at] + data + good[at:])
    with suppress(InsightError):  # nothing to show
        read_run(folder)


def test_a_record_that_says_it_is_huge(tmp_path: Path) -> None:
    from tensorboardX.crc32c import crc32c

    head = struct.pack("<Q", 1 << 60)
    masked = ((crc32c(head) >> 15 | crc32c(head) << 17) + 0xA282EAD8) & 0xFFFFFFFF
    (tmp_path / "events.out.tfevents.1").write_bytes(head + struct.pack("<I", masked))
    with pytest.raises(InsightError, match="a record of 1,152,921,504,606,846,976 bytes"):
        read_run(tmp_path)


def test_a_training(tmp_path: Path) -> None:
    history = [Epoch(n, 10 * n, 2 / n, {"loss": 3 / n, "accuracy": n / 4}, True, 0.1, 1.5) for n in (1, 2, 3)]
    facts = {"finished": True, "best": 3, "test": {"accuracy": 0.5}, "history": [_plain(epoch) for epoch in history]}
    (tmp_path / "metrics.json").write_text(json.dumps(facts))
    run = read_run(tmp_path)
    curves = {curve.name: curve for curve in run.curves}
    assert curves["train/loss"].values == [2, 1, 2 / 3]
    assert curves["validation/loss"].group == curves["train/loss"].group == "loss"
    assert curves["validation/accuracy"].steps == [1, 2, 3]
    assert ("test accuracy", "0.5") in run.facts


def test_a_simulation(tmp_path: Path) -> None:
    rows = [RoundRow(number=n, drawn=4, devices=3, metrics={"loss": 1 / n}, tested={"accuracy": n / 2}) for n in (1, 2)]
    settings_of = RoundSettings(cohort=4)
    record = Record(bundle="0" * 64, population=9, examples="x", settings=settings_of, engine="onnx", rows=rows)
    (tmp_path / "history.json").write_bytes(msgspec.json.encode(record))
    (tmp_path / "round-2.safetensors").write_bytes(
        write_weights({"parameter/w": np.ones((2, 3), np.float32), "state/m": np.zeros(2, np.float32)})
    )
    run = read_run(tmp_path)
    curves = {curve.name: curve for curve in run.curves}
    assert curves["test/accuracy"].values == [0.5, 1]
    assert curves["train/loss"].x == "round"
    assert ("rounds", "2") in run.facts
    [(label, arrays)] = read_versions(run.weights, [])
    assert (label, list(arrays)) == ("round-2", ["w"])


def test_a_table_of_a_task(tmp_path: Path) -> None:
    with (tmp_path / "rounds.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerows([["round", "ended", "loss"], [1, 1e9, 0.5], [2, 1e9, ""], [3, 1e9, 0.25]])
    run = read_run(tmp_path)
    assert [(curve.name, curve.x, curve.steps, curve.values) for curve in run.curves] == [
        ("loss", "round", [1, 3], [0.5, 0.25])
    ]


def test_weights_over_rounds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rounds = {number: rng.normal(number, 1, (20, 30)).astype(np.float32) for number in (2, 10, 1)}
    for number, array in rounds.items():
        (tmp_path / f"round-{number}.safetensors").write_bytes(write_weights({"w": array, "alone": array[:1]}))
    run = read_run(tmp_path)
    series = {each.name: each for each in weight_histograms(read_versions(run.weights, run.notes))}
    assert [step.label for step in series["w"].steps] == ["round-1", "round-2", "round-10"]
    for step, number in zip(series["w"].steps, (1, 2, 10)):
        counts = step.statistics.counts
        assert counts == np.histogram(rounds[number].astype(np.float64), len(counts))[0].tolist()


@pytest.mark.sampled(every=3)
def test_long_curves_are_thinned(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(2500):
            writer.add_scalar("loss", step, step)
    [curve] = read_run(tmp_path).curves
    assert curve.steps[-1] == 2499
    assert len(curve.steps) + curve.left_out == 2500
    assert len(curve.steps) <= 2001


def test_a_folder_with_nothing(tmp_path: Path) -> None:
    with pytest.raises(InsightError, match="nothing to show"):
        read_run(tmp_path)
