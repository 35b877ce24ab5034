"""All conditions together: order, what fails, settings, and an agent that keeps to them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from archipel.client import Conditions, ConditionSettings, Probe
from archipel.client.conditions.probes.device import Battery, Charging, Idle, Temperature
from archipel.client.conditions.probes.network import Unmetered
from archipel.client.conditions.probes.space import Memory
from archipel.errors import ClientError
from tests.support.federation import Federation

Tree = Callable[..., Path]
GIB = 1 << 30
MACHINE = {
    "sys/class/power_supply/AC/type": "Mains",
    "sys/class/power_supply/AC/online": "1",
    "sys/class/power_supply/BAT0/type": "Battery",
    "sys/class/power_supply/BAT0/status": "Not charging",
    "sys/class/power_supply/BAT0/capacity": "80",
    "sys/class/power_supply/BAT0/present": "1",
    "sys/class/thermal/thermal_zone0/temp": "40000",
    "sys/devices/system/cpu/online": "0-3",
    "proc/loadavg": "0.20 0.20 0.20 1/200 4000",
    "proc/net/route": "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0",
    "proc/net/ipv6_route": "",
    "sys/class/net/eth0/uevent": "INTERFACE=eth0",
    "proc/meminfo": "MemAvailable: 4000000 kB",
    "proc/self/cgroup": "0::/",
    "sys/fs/cgroup/cgroup.controllers": "memory",
    "sys/fs/cgroup/memory.max": str(2 * GIB),
    "sys/fs/cgroup/memory.current": str(GIB),
    "sys/fs/cgroup/memory.stat": "inactive_file 0",
}


def probes(root: Path) -> list[Probe]:
    return [
        Charging(root), Battery(50, root), Temperature(60, root), Idle(0.5, root), Unmetered(root=root),
        Memory(GIB // 2, root),
    ]  # fmt: skip


@dataclass
class Mine:
    """A caller's own."""

    answer: Any = ""
    measured: Any = 1.5
    name: str = "mine"

    def why_not(self) -> str:
        return self._say(self.answer)

    def value(self) -> str | float | bool:
        return self._say(self.measured)

    def _say(self, what: Any) -> Any:
        if isinstance(what, BaseException):
            raise what
        return what


def test_all_must_hold_and_the_first_reason_is_given(tree: Tree) -> None:
    conditions = Conditions([*probes(tree(MACHINE)), Mine()])
    assert conditions() == conditions.why_not() == ""
    assert conditions.values() == {
        "charging": True, "battery": 80.0, "temperature": 40.0, "idle": 0.05, "unmetered": True, "memory": float(GIB),
        "mine": 1.5,
    }  # fmt: skip
    tree({"sys/class/thermal/thermal_zone0/temp": "75000", "proc/net/route": ""})
    assert conditions() == "too hot: 75 degrees Celsius, allowed are 60 (setting max_temperature)"
    assert {name: bool(reason) for name, reason in conditions.reasons().items()} == {
        "charging": False, "battery": False, "temperature": True, "idle": False, "unmetered": True, "memory": False,
        "mine": False,
    }  # fmt: skip
    assert Conditions([]).why_not() == ""


NO_TEXT = b"\xff\xfe\x00"
# Any text is a kind of supply, and there may be no route and no group.
ANY_TEXT = ("type", "route", "proc/self/cgroup", "uevent", "present", "controllers")
MALFORMED = [b"", b"garbage", b"99999999999999999999", b"1" * 5000, b"\n\n5\n5"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((file, NO_TEXT) for file in MACHINE if not file.endswith("controllers")),
        *((file, content) for file in MACHINE if not file.endswith(ANY_TEXT) for content in MALFORMED),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_malformed_file_is_a_reason(tree: Tree, file: str, content: bytes) -> None:
    conditions = Conditions(probes(tree({**MACHINE, file: content})))
    reason = conditions.why_not()
    assert file in reason
    assert "cannot be checked: " in reason
    assert "\n" not in reason
    assert len(reason) <= 300
    conditions.values()
    tree({file: MACHINE[file]})
    assert conditions.why_not() == ""


@pytest.mark.parametrize(
    "file",
    ["sys/class/power_supply/BAT0/status", "sys/class/power_supply/BAT0/capacity", "sys/class/power_supply/AC/type",
     "sys/devices/system/cpu/online", "proc/loadavg", "proc/net/route", "proc/meminfo", "sys/fs/cgroup/memory.current",
     "sys/fs/cgroup/memory.stat"],
)  # fmt: skip
def test_a_file_that_is_gone_is_a_reason(tree: Tree, file: str) -> None:
    root = tree({**MACHINE})
    tree({file: None})
    assert f"{root / file} cannot be read (No such file or directory)" in Conditions(probes(root)).why_not()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ValueError("no\nsuch  thing"), "the condition 'mine' cannot be checked: ValueError: no such thing"),
        (RuntimeError(), "the condition 'mine' cannot be checked: RuntimeError:"),
        (ClientError("the sensor sleeps"), "the condition 'mine' cannot be checked: the sensor sleeps"),
        (None, "the condition 'mine' answers None, expected a text"),
        (True, "the condition 'mine' answers True, expected a text"),
        (" \n", r"the condition 'mine' answers ' \n', expected a text"),
        ("the\nkeeper  sleeps", "the keeper sleeps"),
    ],
)
def test_what_a_probe_says_or_raises(answer: object, reason: str) -> None:
    assert Conditions([Mine(answer)]).why_not() == reason


def test_what_cannot_be_measured_is_left_out() -> None:
    conditions = Conditions([Mine(measured=OSError("x")), Mine(measured=None, name="b"), Mine(measured=True, name="c")])
    assert conditions.values() == {"c": True}


def test_interrupts_pass() -> None:
    with pytest.raises(KeyboardInterrupt):
        Conditions([Mine(KeyboardInterrupt())]).why_not()


def test_names_are_of_one_probe_each() -> None:
    with pytest.raises(ClientError, match="two conditions are called 'mine'; give each probe a name of its own"):
        Conditions([Mine(), Mine()])


# --- settings -----------------------------------------------------------------------------------------------------

ALL: dict[str, Any] = {
    "charging": True, "min_battery": 20, "idle": 0.5, "unmetered": True, "hours": ("22:00-06:00",),
    "max_temperature": 60.0, "min_free_memory": 1 << 28, "min_free_disk": 1 << 30,
}  # fmt: skip


def test_settings_become_probes(tmp_path: Path) -> None:
    assert ConditionSettings().conditions(tmp_path).probes == ()
    names = {
        "charging": "charging", "min_battery": "battery", "idle": "idle", "unmetered": "unmetered", "hours": "hours",
        "max_temperature": "temperature", "min_free_memory": "memory", "min_free_disk": "disk",
    }  # fmt: skip
    for setting, value in ALL.items():
        [probe] = ConditionSettings(**{setting: value}).conditions(tmp_path).probes
        assert probe.name == names[setting]
        if value is not True:
            assert getattr(probe, setting) == value
    conditions = ConditionSettings(**ALL).conditions(tmp_path)
    assert {probe.name for probe in conditions.probes} == set(names.values())
    [unmetered] = ConditionSettings(unmetered=True, metered_interfaces=("x*",)).conditions(tmp_path).probes
    assert unmetered == Unmetered(("x*",))


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("min_battery", 101, "min_battery must be a number of per cent above 0 and at most 100, is 101"),
        ("idle", 0, "idle must be a number of busy threads for each core above 0 and at most 100, is 0"),
        (
            "max_temperature",
            333.15,
            "max_temperature must be a number of degrees Celsius above -273.15 and at most 200",
        ),
        ("min_free_memory", "1 GiB", "min_free_memory must be a number of bytes above 0, is '1 GiB'"),
        ("min_free_disk", -1, "min_free_disk must be a number of bytes above 0, is -1"),
        ("hours", "22:00-06:00", r'hours must be a list of windows such as \["22:00-06:00"\]'),
        ("hours", ("22-06",), "hours must be windows such as \"22:00-06:00\" .*, one is '22-06'"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, setting: str, value: object, text: str) -> None:
    with pytest.raises(ClientError, match=text):
        ConditionSettings(**{setting: value}).conditions(tmp_path)  # type: ignore[arg-type]


def test_elsewhere_than_on_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    for setting in ("charging", "min_battery", "idle", "unmetered", "max_temperature", "min_free_memory"):
        with pytest.raises(ClientError, match=f"^{setting}: .* this is win32; leave the setting out and pass a probe"):
            ConditionSettings(**{setting: ALL[setting]}).conditions(tmp_path)
    assert ConditionSettings(hours=("00:00-24:00",), min_free_disk=1).conditions(tmp_path)() == ""


# --- use ----------------------------------------------------------------------------------------------------------


def test_this_machine_and_what_it_costs(tmp_path: Path) -> None:
    """Asked four times a second while there is work: less than one per cent of a core."""
    settings = {**ALL, "hours": ("00:00-24:00",), "idle": 100, "min_battery": 1, "max_temperature": 150}
    conditions = ConditionSettings(**{**settings, "min_free_memory": 1, "min_free_disk": 1}).conditions(tmp_path)
    assert not [reason for reason in conditions.reasons().values() if "cannot be checked" in reason]
    assert {"hours", "idle", "memory", "disk", "charging"} <= conditions.values().keys()
    conditions()
    before = time.process_time()
    for _ in range(100):
        conditions()
    assert (time.process_time() - before) / 100 < 0.0025 * 4  # 0.6 ms measured
    files = len(os.listdir("/proc/self/fd"))
    conditions()
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.sampled(every=4)
def test_an_agent_keeps_to_them(federation: Federation, tree: Tree) -> None:
    root = tree(MACHINE)
    agent = federation.agent(0, conditions=Conditions([*probes(root), Mine()]))
    assert agent.run_once().kind == "waiting"
    tree({"sys/class/power_supply/BAT0/status": "Discharging"})
    outcome = agent.run_once()
    assert (outcome.kind, outcome.reason) == (
        "paused", "the conditions for work do not hold: not charging (setting charging)"
    )  # fmt: skip
    tree({"sys/class/power_supply/BAT0/status": "Charging"})
    assert agent.run_once().kind == "waiting"
