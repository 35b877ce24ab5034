"""Charging, battery and temperature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from archipel.client.conditions.probes.device import Battery, Charging, Temperature
from archipel.errors import ClientError

Tree = Callable[..., Path]


def supply(name: str, **files: str) -> dict[str, str]:
    return {f"sys/class/power_supply/{name}/{key}": value for key, value in files.items()}


MAINS = supply("AC", type="Mains", online="1")
UNPLUGGED = supply("AC", type="Mains", online="0")
USB = supply("usb", type="USB", online="2")  # 2: programmable


def battery(status: str, name: str = "BAT0", capacity: str = "50", **more: str) -> dict[str, str]:
    return supply(name, type="Battery", status=status, capacity=capacity, **more)


@pytest.mark.parametrize(
    ("files", "charging"),
    [
        ({}, True),  # neither battery nor anything else
        (MAINS, True),
        (UNPLUGGED, True),  # a desktop whose supply says nothing of use: it runs, so it is on power
        ({**UNPLUGGED, **battery("Discharging")}, False),
        ({**MAINS, **battery("Charging")}, True),
        ({**UNPLUGGED, **battery("Charging")}, True),
        (battery("Full"), True),
        (battery("Not charging"), False),
        ({**MAINS, **battery("Not charging")}, True),  # held at 80 per cent
        ({**MAINS, **battery("Unknown")}, True),
        (battery("Unknown"), False),
        ({**USB, **battery("Charging")}, True),
        ({**USB, **battery("Discharging")}, False),  # a charger that is too weak
        ({**battery("Discharging"), **battery("Full", "BAT1")}, False),
        ({**MAINS, **battery("Charging"), **battery("Unknown", "BAT1")}, True),
        ({**battery("Discharging", "mouse", scope="Device")}, True),  # a mouse's, not this device's
        ({**battery("Charging", "mouse", scope="Device"), **battery("Discharging")}, False),
        ({**supply("pad", type="Wireless", online="1", scope="Device"), **battery("Unknown")}, False),
        ({**battery("Discharging", present="0")}, True),  # an empty slot
        ({**supply("ups", type="UPS", status="Discharging", capacity="90")}, False),
        ({**supply("port", type="USB"), **battery("Charging")}, True),  # a port that does not say
    ],
)
def test_charging(tree: Tree, files: dict[str, str], charging: bool) -> None:
    probe = Charging(tree(files))
    assert probe.value() is charging
    assert probe.why_not() == ("" if charging else "not charging (setting charging)")


@pytest.mark.parametrize(
    ("files", "level"),
    [
        ({}, None),
        (MAINS, None),
        (battery("Charging"), 50.0),
        ({**battery("Discharging", capacity="20"), **battery("Unknown", "BAT1", capacity="90")}, 55.0),
        ({**battery("Discharging", "mouse", capacity="3", scope="Device")}, None),
    ],
)
def test_battery(tree: Tree, files: dict[str, str], level: float | None) -> None:
    root = tree(files)
    if level is None:
        assert Battery(100, root).why_not() == ""
        with pytest.raises(ClientError, match="there is no battery"):
            Battery(100, root).value()
        return
    assert Battery(level, root).value() == level
    assert Battery(level, root).why_not() == ""
    assert Battery(level + 0.5, root).why_not() == (
        f"the battery is at {level:g} per cent, below {level + 0.5:g} (setting min_battery)"
    )


def zone(number: int, temp: str | bytes) -> dict[str, str | bytes]:
    return {f"sys/class/thermal/thermal_zone{number}/temp": temp}


def test_the_hottest_zone_counts(tree: Tree) -> None:
    root = tree(
        {**zone(0, "41000"), **zone(1, "60500"), **zone(10, "-274000"), "sys/class/thermal/cooling_device0/x": "9"}
    )
    assert Temperature(60.5, root).value() == 60.5
    assert Temperature(60.5, root).why_not() == ""
    assert Temperature(60, root).why_not() == (
        "too hot: 60.5 degrees Celsius, allowed are 60 (setting max_temperature)"
    )


def test_zones_that_cannot_be_read_are_left_out(tree: Tree) -> None:
    root = tree({"sys/class/thermal/thermal_zone0/temp/x": "a folder cannot be read"})
    assert Temperature(20, root).why_not() == ""
    with pytest.raises(ClientError, match="no thermal zone can be read"):
        Temperature(20, root).value()
    tree(zone(1, "50000"))
    assert Temperature(20, root).value() == 50
    assert Temperature(20, tree({"sys/class/thermal": None})).why_not() == ""


def test_this_machine() -> None:
    there = psutil.sensors_battery()
    if there is None:
        assert Charging().why_not() == ""
        assert Battery(100).why_not() == ""
    else:
        assert abs(Battery(1).value() - there.percent) <= 2
        if there.power_plugged is not None:
            assert Charging().value() is there.power_plugged
    if list(Path("/sys/class/thermal").glob("thermal_zone*")):
        assert -100 < Temperature(100).value() < 150
    else:
        assert Temperature(-270).why_not() == ""
