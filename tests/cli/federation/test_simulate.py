"""`archipel simulate`: what it prints and writes, and how it ends when it is stopped."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow.parquet as pq
import pytest

from archipel import durable
from archipel.simulation import running
from tests.support.commands import Command
from tests.support.development import place_development_key
from tests.support.simulation import clients, dense, imported

FILE = """
rounds = 4
cohort = 2
dropout = 0.3
seed = 10
model = { onnx = "network.onnx" }
training = { optimizer = { name = "sgd", lr = 0.2 }, batch_size = 8 }
data = { train = "data.npz", hold_out = 0.2 }
partition = { how = "iid", clients = 4 }
run = { client_axis = "off" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place_development_key(Path(os.environ["XDG_CONFIG_HOME"]))
    imported(dense).save(tmp_path / "network.onnx")
    x, y = (np.concatenate(arrays) for arrays in zip(*clients()))
    np.savez(tmp_path / "data.npz", x=x, y=y)
    (tmp_path / "federation.toml").write_text(FILE)
    return tmp_path / "federation.toml"


@pytest.mark.sampled(every=8)
def test_rounds_are_shown_and_written(archipel: Command, file: Path, tmp_path: Path) -> None:
    out, _ = archipel(
        "simulate", str(file), "--parquet", str(tmp_path / "r.parquet"), "--plot", str(tmp_path / "r.svg")
    )
    lines = out.splitlines()
    assert lines[0] == f"{file}: 4 devices, 2 a round, 4 rounds"
    assert re.split("  +", lines[1].strip()) == [
        "round", "devices", "training accuracy", "training loss", "test accuracy", "test loss", "seconds"
    ]  # fmt: skip
    written = pq.read_table(tmp_path / "r.parquet").to_pydict()
    for number, line in enumerate(lines[2:6]):
        cells = line.split()
        assert int(cells[0]) == number + 1
        devices = written["devices"][number]
        assert cells[1] == ("2" if devices == 2 else f"{devices}/2")
        if devices:
            expected = [written[name][number] for name in ("training accuracy", "test loss")]
            np.testing.assert_allclose([float(cells[2]), float(cells[5])], expected, atol=5.1e-5)
    assert lines[4].endswith("no device's update came")
    assert lines[6].startswith(f"test: accuracy {written['test accuracy'][-1]:.4f}, loss")
    assert lines[7] == "ran one device after the other, as asked for"
    assert re.fullmatch(r"4 rounds in [0-9.]+ s, [0-9.]+ s with reading, converting and measuring", lines[8])
    assert lines[9:] == [f"written to {tmp_path / 'r.svg'}", f"written to {tmp_path / 'r.parquet'}"]
    assert (tmp_path / "r.svg").exists()


@pytest.mark.sampled(every=3)
def test_what_a_run_came_to_is_told_though_the_disk_has_no_room_for_a_plot(
    archipel: Command, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = durable.sync_open

    def full(file: IO[bytes]) -> None:
        if "curves.svg" in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(durable, "sync_open", full)
    plot = tmp_path / "curves.svg"
    out, error = archipel("simulate", str(file), "--plot", str(plot), code=1)
    assert "test: accuracy" in out
    assert error == f"archipel: {plot}: No space left on device; free some space and run again\n"
    assert not plot.exists()


@pytest.mark.sampled(every=4)
def test_secure_rounds_and_what_noise_costs_are_told(archipel: Command, file: Path) -> None:
    noise = "differential_privacy={mechanism = 'central', noise_multiplier = 1.0, delta = 1e-4}"
    out, _ = archipel(
        "simulate", str(file), "--secure", "--rounds", "2", "--set", "dropout=0", "--set", noise,
        "--set", "strategy={name = 'fedavg', weighting = 'uniform', clip = 0.5}",
    )  # fmt: skip
    lines = out.splitlines()
    assert "secure: carried out in 2 of 2 rounds; each sum was that of the bare updates" in lines
    assert any(
        re.fullmatch(r"privacy: 2 noisy sums cost epsilon \S+ for each device, at delta 0.0001", each) for each in lines
    )


@pytest.mark.sampled(every=3)
def test_a_mistake_in_a_function_of_ones_own_is_one_line(archipel: Command, file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def load(much=1):\n    return read(much)\n\n\ndef read(much):\n    return much[3]\n"
    )
    (tmp_path / "torn.py").write_text("def load():\n    return (\n")
    for name, line, text in (("mine.py", 6, "TypeError: 'int' object is not subscriptable"), ("torn.py", 2, "")):
        _, error = archipel("simulate", str(file), "--set", f"data={{python = '{name}:load'}}", code=1)
        assert error.startswith(f"archipel: {file}: data.python: {name}, line {line}: {text}")
        assert error.count("\n") == 1


@pytest.mark.sampled(every=4)
def test_a_test_without_the_devices_own_tensors_is_called_so(archipel: Command, file: Path) -> None:
    note = "that is without what devices keep for themselves"
    for strategy, own in (("ifca", True), ("fedavg", False)):
        out, _ = archipel("simulate", str(file), "--set", f"strategy.name={strategy}", "--set", "rounds=1")
        assert (note in out) == own


@pytest.mark.sampled(every=4)
def test_what_devices_measure_is_shown(archipel: Command, file: Path) -> None:
    out, _ = archipel(
        "simulate", str(file), "--set", "evaluation.hold_out=0.3", "--set", "evaluation.every=9", "--json"
    )
    rows = json.loads(out)["rounds"]
    assert [bool(row.get("spread")) for row in rows] == [False, False, False, True]
    spread = rows[-1]["spread"]["loss"]
    out, _ = archipel("simulate", str(file), "--set", "evaluation.hold_out=0.3")
    line = next(line for line in out.splitlines() if line.startswith("devices: loss"))
    mean, worst = (f"{spread[name]['value']:.4g}" for name in ("mean", "worst"))
    assert line.startswith(f"devices: loss mean {mean}, worst 10% {worst}, deciles 1, 5, 9: ")
    assert line.endswith(" (4 devices)")


def test_json_is_for_scripts_and_options_go_before_the_file(archipel: Command, file: Path) -> None:
    out, _ = archipel("simulate", str(file), "--json", "--rounds", "1", "--set", "dropout=0", "--set", "cohort=3")
    found = json.loads(out)
    assert [(row["number"], row["devices"], row["drawn"]) for row in found["rounds"]] == [(1, 3, 3)]
    assert found["tested"] == found["rounds"][0]["tested"]


@pytest.mark.sampled(every=3)
def test_ctrl_c_ends_after_a_round_and_the_command_goes_on(
    archipel: Command, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my run"
    with monkeypatch.context() as patched:
        measured = 0

        def interrupt(*arguments: object) -> object:
            nonlocal measured
            measured += 1
            if measured == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return dict[str, float]()

        patched.setattr(running, "_measurer", lambda *_: interrupt)
        out, err = archipel("simulate", str(file), "--folder", str(folder), code=130)
    assert f"how far it came is in '{folder}'; the same command goes on from there" in err
    assert re.findall(r"^ +(\d+) ", out, re.M) == ["1", "2"]
    out, _ = archipel("simulate", str(file), "--folder", str(folder))
    assert re.findall(r"^ +(\d+) ", out, re.M) == ["3", "4"]


def test_mistakes_are_one_line(archipel: Command, file: Path, tmp_path: Path) -> None:
    _, err = archipel("simulate", str(file), "--set", "partition.clients=999", code=1)
    assert err == f"archipel: {file}: partition: 42 examples are too few for 999 devices; choose fewer devices\n"
    _, err = archipel("simulate", str(file), "--plot", "curves.gif", code=1)
    assert err.startswith("archipel: curves.gif: the name of a plot must end in")
    file.write_text("rounds = ")
    _, err = archipel("simulate", str(file), code=1)
    assert err == f"archipel: {file}: Invalid value (at end of document)\n"


def test_what_cannot_be_written_is_told_before_the_rounds(
    archipel: Command, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        out, err = archipel("simulate", str(file), *arguments, code=1)
        assert out == ""
        return err

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pyarrow is not installed" in refused("--parquet", str(tmp_path / "rounds.parquet"))
    monkeypatch.undo()
    for option in ("--plot", "--parquet"):
        assert "there is no folder" in refused(option, str(tmp_path / "nosuch" / "a.png"))
        (tmp_path / "a.png").mkdir(exist_ok=True)
        assert "a.png: is a folder; give the name of a file" in refused(option, str(tmp_path / "a.png"))
    _, err = archipel("simulate", str(file), "--folder", str(tmp_path / "data.npz"), code=1)
    assert "data.npz: cannot be written (File exists); give another folder" in err


@pytest.mark.sampled(every=6)
def test_what_noise_costs_is_told_and_why_rounds_are_missing(archipel: Command, file: Path) -> None:
    given = (
        "dropout=0", "rounds=9", "hyperparameters.update_clip=1.0", "strategy.name=fedavg",
        "strategy.weighting=uniform", "differential_privacy.mechanism=central", "differential_privacy.epsilon=4",
        "differential_privacy.delta=0.001", "differential_privacy.noise_multiplier=2.0",
    )  # fmt: skip
    out, _ = archipel("simulate", str(file), *(word for setting in given for word in ("--set", setting)))
    [hint] = (line for line in out.splitlines() if line.startswith("hint: "))
    assert re.search(r"privacy noise drowns the updates: .* What would help, .* devices a round; ", hint)
    assert out.index(hint) < out.index("round  devices")
    found = re.search(r"privacy: (\d+) noisy sums cost epsilon ([\d.]+) for each device", out)
    assert found is not None
    sums, epsilon = int(found[1]), float(found[2])
    assert f"{sums} rounds in " in out
    assert 1 < sums < 9
    # So many Gaussian releases are one with a multiplier smaller by the root of their number, whose exact delta for
    # this epsilon is Balle and Wang's (2018, theorem 8). The accountant is no lower, and stays within the budget.
    mu = sums**0.5 / 2.0

    def normal(value: float) -> float:
        return 0.5 * (1 + math.erf(value / 2**0.5))

    delta = normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)
    assert delta <= 0.001
    assert epsilon <= 4
    assert re.search(r"ended early: another round would cost epsilon [\d.]+ in all, and 4 is allowed", out)
