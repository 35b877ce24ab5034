"""Settings come from a file, the environment and the caller, in this order; what is wrong is said in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from archipel.errors import ClientError
from archipel.protocol.settings_file import load


class Lamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    colours: tuple[str, ...] = ()
    watts: Annotated[float, Meta(gt=0)] = 5.0

    def __post_init__(self) -> None:
        if self.watts == 13:
            raise ClientError("watts must not be 13")


class House(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    folder: str
    rooms: Annotated[int, Meta(ge=1)] = 1
    plan: Path | None = None
    labels: Mapping[str, str | float] = {}
    lamp: Lamp = Lamp()
    spare: Lamp | None = None


def read(file: Path, environment: Mapping[str, str] | None = None, **given: Any) -> House:
    return load(
        file, House, prefix="HOUSE_", environment=environment or {}, remedy="write one",
        given={"folder": "here", **given}, only_given={"folder": "is where the file lies"},
    )  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "house.toml").write_text("")
    return tmp_path / "house.toml"


def test_the_caller_goes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    file.write_text('rooms = 2\nplan = "plan.pdf"\nlabels = {a = 1.5}\n[lamp]\nwatts = 3\n[spare]\nwatts = 4.0')
    found = read(file)
    assert found == House(
        folder="here", rooms=2, plan=file.parent / "plan.pdf", labels={"a": 1.5}, lamp=Lamp(watts=3.0),
        spare=Lamp(watts=4.0),
    )  # fmt: skip
    told = {
        "HOUSE_ROOMS": "3",
        "HOUSE_PLAN": "/p",
        "HOUSE_LAMP_COLOURS": "red,blue,",
        "HOUSE_SPARE_WATTS": "6",
        "X": "",
    }
    found = read(file, told)
    assert (found.rooms, found.plan, found.lamp) == (3, Path("/p"), Lamp(watts=3.0, colours=("red", "blue")))
    assert found.spare == Lamp(watts=6.0)
    assert read(file, told, rooms=4).rooms == 4


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ('["a,b", "", "[c]"]', ("a,b", "", "[c]")),
        ("[]", ()),
        ("a,[b]", ("a", "[b]")),
        ("", ()),
    ],
)
def test_lists_in_variables(file: Path, text: str, items: tuple[str, ...]) -> None:
    assert read(file, {"HOUSE_LAMP_COLOURS": text}).lamp.colours == items


@pytest.mark.parametrize(
    ("text", "environment", "given", "said"),
    [
        ("room = 1", {}, {}, "FILE: unknown field 'room'; did you mean 'rooms'?"),
        ("rooms = 0", {}, {}, "FILE: rooms: expected `int` >= 1, got 0"),
        ("rooms = true", {}, {}, "FILE: rooms: expected `int`, got `bool`"),
        ("plan = 3", {}, {}, "FILE: plan: expected a path, got 3"),
        ("folder = '/'", {}, {}, "FILE: 'folder' is where the file lies"),
        ("lamp = 3", {}, {}, "FILE: lamp: expected `object`, got `int`"),
        ("lamp = 3", {"LAMP_WATTS": "3"}, {}, "FILE: lamp: expected a table, [lamp]"),
        ("[lamp]\nwats = 3", {}, {}, "FILE: lamp: unknown field 'wats'; did you mean 'watts'?"),
        ("[lamp]\nwatts = 0", {}, {}, "FILE: lamp.watts: expected `float` > 0.0, got 0"),
        ("[lamp]\nwatts = 13", {}, {}, "FILE: watts must not be 13"),
        ("[lamp]\nwatts = inf", {}, {}, "FILE: lamp.watts: expected a finite number, got inf"),
        ("", {"LAMP_WATTS": "13"}, {}, "environment variable HOUSE_LAMP_WATTS: watts must not be 13"),
        ("", {"LAMP_WATTS": "nan"}, {}, "environment variable HOUSE_LAMP_WATTS: expected `float` > 0.0, got nan"),
        ("", {"ROOMS": "0"}, {}, "environment variable HOUSE_ROOMS: expected `int` >= 1, got 0"),
        ("", {"ROMS": "1"}, {}, "environment variable HOUSE_ROMS: no such setting; did you mean 'HOUSE_ROOMS'?"),
        ("", {"LABELS": "a"}, {}, "environment variable HOUSE_LABELS: no such setting; "),
        ("", {"FOLDER": "/"}, {}, "environment variable HOUSE_FOLDER: no such setting; "),
        ("", {"LAMP_COLOURS": "[a, b]"}, {}, "environment variable HOUSE_LAMP_COLOURS: what begins with [ is a list"),
        ("", {"LAMP_COLOURS": "[" * 100_000}, {}, "environment variable HOUSE_LAMP_COLOURS: what begins with [ is a"),
        ("", {"LAMP_COLOURS": "[1]"}, {}, "environment variable HOUSE_LAMP_COLOURS[0]: expected `str`, got `int`"),
        ("rooms = 2", {}, {"rooms": 0}, "rooms: expected `int` >= 1, got 0"),
        ("", {}, {"room": 0}, "FILE: unknown field 'room'; did you mean 'rooms'?"),
    ],
)  # fmt: skip
def test_what_is_wrong(file: Path, text: str, environment: dict[str, str], given: dict[str, Any], said: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read(file, {f"HOUSE_{name}": value for name, value in environment.items()}, **given)
    assert str(error.value).startswith(said.replace("FILE", str(file)))
    assert "\n" not in str(error.value)


def test_all_mistakes_are_told_whatever_they_are_in(file: Path) -> None:
    file.write_text("wats = 3\n[lamp]\nwatts = 0")
    with pytest.raises(ValueError) as error:
        read(file, {"HOUSE_ROOMS": "0", "HOUSE_ROMS": "1", "HOUSE_LAMP_COLOURS": "[a"})
    told = str(error.value).split("; ")
    for start in ("environment variable HOUSE_ROOMS: expected", "environment variable HOUSE_ROMS: no such setting",
                  "environment variable HOUSE_LAMP_COLOURS: what begins with [", f"{file}: unknown field 'wats'",
                  "lamp.watts: expected"):  # fmt: skip
        assert len([each for each in told if each.startswith(start)]) == 1, (start, told)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"house.toml: cannot be read \(No such file or directory\); write one$"):
        read(tmp_path / "house.toml")
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\); write one$"):
        read(tmp_path)
