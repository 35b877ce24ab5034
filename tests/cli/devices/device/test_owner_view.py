"""The owner's view is computed from the journal: what counts as sent, hidden, seen; what it does not claim to know."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from archipel.cli.devices.device_owner import _lines
from archipel.client.conditions.conditions import Conditions
from archipel.client.memory.folder import lock_folder
from archipel.client.owner_view import is_running, look, present_conditions
from archipel.errors import ClientError
from archipel.protocol.messages import ServerNoise
from archipel.protocol.sealed import encode
from tests.client.memory.test_spending import entry


class Broken:
    name = "broken"

    def value(self) -> float:
        raise OSError("no such sensor")

    def why_not(self) -> str:
        raise OSError("no such sensor")


class Absent(Broken):
    name = "battery"

    def why_not(self) -> str:
        return ""


class Hot(Broken):
    name = "temperature"

    def value(self) -> float:
        return 81.25

    def why_not(self) -> str:
        return "81.2 degrees, above 70"


def test_conditions_that_fail_do_not_hold() -> None:
    broken, absent, hot = present_conditions(Conditions([Broken(), Absent(), Hot()]))
    assert (broken.value, broken.holds) == (None, False)
    assert "no such sensor" in broken.why_not
    assert (absent.value, absent.holds, absent.why_not) == (None, True, "")
    assert (hot.value, hot.holds, hot.why_not) == (81.25, False, "81.2 degrees, above 70")


def test_lines_for_people(tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    for each in (
        entry(1),
        entry(2, privacy="plain", result="dropped", reason="the round failed: too\x1b few\ndevices"),
    ):
        (tmp_path / "rounds" / f"{each.round_id}.json").write_bytes(encode(each))
    lines = list(_lines(look(tmp_path, Conditions([Hot()]))))
    assert "temperature  81.25  no: 81.2 degrees, above 70" in lines
    began = next(line for line in lines if line.startswith("1970-01-01 00:16:42Z"))
    assert began.split()[2:8] == ["11111111", "training", "plain", "0", "10", "3"]
    assert began.endswith("the round failed: too? few?devices")
    assert any(line.startswith("rounds      2 since 1970-01-01 00:16:41Z: 1 took part, 1 dropped") for line in lines)
    row = next(line for line in lines if line.startswith("11111111  linear"))
    assert re.split("  +", row)[2:] == ["training", "1", "5 at least, 5 on average", "1", "0", "20", "0 of 2", "-", "-"]
    assert lines[-1].startswith("no epsilon: 2 rounds added no noise")


def test_epsilon_of_rounds_with_noise(tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    for number in range(3):
        each = entry(number, cohort=4 + number, noise="added", rho=[0.25, 0.25, 0.0][number])
        (tmp_path / "rounds" / f"{each.round_id}.json").write_bytes(encode(each))
    lines = list(_lines(look(tmp_path)))
    row = next(line for line in lines if line.startswith("11111111  linear"))
    # dp-accounting 0.6.0, RdpAccountant: one Gaussian with multiplier 1 at delta 1e-6 has 5.22154.
    assert re.split("  +", row)[3:] == ["3", "4 at least, 5 on average", "0", "0", "30", "2 of 3", "5.22", "-"]
    assert lines[-2].startswith("noise: in 2 of 3 rounds, which are together differentially private for each example")
    assert "with epsilon 5.22 at most, at delta 1e-06" in lines[-2]
    assert lines[-1].startswith("no epsilon: 1 rounds added no noise, or none of a strength that the bundle states")


def test_noise_of_the_server_is_shown_as_its_word(tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    for number, spent in ((1, 2.0), (2, 3.4567), (3, None)):
        stated = None if spent is None else ServerNoise(mechanism="central", multiplier=9, epsilon=spent, delta=1e-5)
        (tmp_path / "rounds" / f"{number:032x}.json").write_bytes(encode(entry(number, stated=stated)))
    lines = list(_lines(look(tmp_path)))
    row = next(line for line in lines if line.startswith("11111111  linear"))
    # The device's own epsilon stays none: what the server says is another column.
    assert re.split("  +", row)[-3:] == ["0 of 3", "-", "central, epsilon 3.46 at 1e-05, in 2 of 3"]
    assert any(line.startswith("server's noise: ") and "server's word" in line for line in lines)
    assert look(tmp_path).privacy.epsilon is None


@pytest.mark.parametrize("name", ["device.json", "rounds/" + "0" * 32 + ".json", "models/linear/state.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(ClientError, match=f"{name}: damaged"):
        look(tmp_path)
    (tmp_path / name).write_bytes(b"{" * (1 << 17))
    with pytest.raises(ClientError, match=f"{name}: damaged .more than 65536 bytes"):
        look(tmp_path)


def test_running_is_who_holds_the_lock(tmp_path: Path) -> None:
    assert is_running(tmp_path) is False
    handle = lock_folder(tmp_path)
    assert is_running(tmp_path) is True
    os.close(handle)
    assert is_running(tmp_path) is False
