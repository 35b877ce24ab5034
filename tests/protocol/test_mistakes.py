"""All that is wrong in settings is told at once, each with the field that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from archipel.errors import ClientError, PolicyError, SimulationError
from archipel.protocol import written
from archipel.protocol.mistakes import MOST, Mistakes, split, tell
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy, DifferentialPrivacyError
from archipel.protocol.settings_file import load

LINES = st.from_regex(r"\A[^\s][^\n\r]*(\n[^\s][^\n\r]*)*\Z").filter(lambda text: text == text.strip())


class Lamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    watts: Annotated[float, Meta(gt=0)]
    colour: Literal["red", "green"] = "red"

    def __post_init__(self) -> None:
        if self.watts == 13:
            raise ClientError("watts must not be 13")


class House(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rooms: Annotated[int, Meta(ge=1)]
    name: str = ""
    lamp: Lamp | None = None
    spares: tuple[Lamp, ...] = ()
    rates: dict[str, float] = {}
    noise: DifferentialPrivacy = DifferentialPrivacy()


def wrong(values: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ValueError) as told:
        written.convert(values, House)
    return split(str(told.value))


@given(st.lists(LINES, min_size=1, max_size=MOST, unique=True))
def test_texts_are_told_and_taken_apart_again(texts: list[str]) -> None:
    told = tell(texts)
    assert split(told) == texts
    assert tell([told]) == told
    if len(texts) == 1:
        assert told == texts[0]
    else:
        assert told.splitlines()[0] == f"{len(texts)} mistakes"


def test_several_of_several_are_one_list() -> None:
    assert tell([tell(["a: 1", "b: 2"]), "c: 3", "a: 1"]) == "3 mistakes\n  a: 1\n  b: 2\n  c: 3"
    many = tell([f"{number}" for number in range(MOST + 3)])
    assert many.splitlines()[-1] == "  and 3 more"
    assert len(many.splitlines()) == MOST + 2


def test_every_field_is_told_with_its_place() -> None:
    assert wrong(
        {
            "romms": 3, "name": 4, "lamp": {"watts": 0, "colour": "gren"}, "spares": [{"watts": 1.0}, {"colour": 1}],
            "rates": {"lr": "high", "mu": 0.5, "nu": float("nan")}, "noise": {"epsilon": -1, "mechanism": "central"},
        }
    ) == [
        "rates.nu: expected a finite number, got nan",
        "unknown field 'romms'; did you mean 'rooms'?",
        "name: expected `str`, got `int`",
        "lamp.watts: expected `float` > 0.0, got 0",
        "lamp.colour: unknown value 'gren'; did you mean 'green'?",
        "spares[1].colour: expected `str`, got `int`",
        "spares[1]: the field 'watts' is missing",
        "rates.lr: expected `float`, got `str`",
        "noise.epsilon: expected `float` > 0.0, got -1",
        "the field 'rooms' is missing",
    ]  # fmt: skip


def test_one_mistake_is_one_line() -> None:
    assert wrong({"rooms": 0}) == ["rooms: expected `int` >= 1, got 0"]
    assert wrong({"rooms": 1, "rates": {"lr": float("inf")}}) == ["rates.lr: expected a finite number, got inf"]


def test_what_the_tables_themselves_check_has_the_table_s_name() -> None:
    """And what is wrong beside it is told with it, though msgspec ends at the table."""
    noise = {"mechanism": "correlated", "clip_noise": 3.0}
    texts = wrong({"noise": noise, "rooms": 0})
    assert texts[-1] == "rooms: expected `int` >= 1, got 0"
    assert [text.split(":")[0] for text in texts[:-1]] == ["noise"] * 3
    for text, word in zip(texts, ("noise_multiplier, epsilon", "separation: is missing", "clip_noise"), strict=False):
        assert word in text
    with pytest.raises(DifferentialPrivacyError) as told:
        DifferentialPrivacy(**noise)  # type: ignore[arg-type]
    assert len(split(str(told.value))) == 3


def test_settings_of_a_process_are_told_in_one_line_with_the_source_of_each(tmp_path: Path) -> None:
    file = tmp_path / "house.toml"
    file.write_text('rooms = 0\n[lamp]\nwatts = 3.0\ncolour = "blue"\n')
    with pytest.raises(ValueError, match="rooms") as told:
        load(file, House, prefix="HOUSE_", environment={}, remedy="write one")
    rooms, colour = "rooms: expected `int` >= 1, got 0", "lamp.colour: unknown value 'blue'; there are: green, red"
    assert str(told.value) == f"{file}: {rooms}; {colour}"
    file.write_text("rooms = 0\n")
    with pytest.raises(ValueError, match="rooms") as told:
        load(file, House, prefix="HOUSE_", environment={"HOUSE_LAMP_WATTS": "13"}, remedy="write one")
    assert str(told.value) == f"{file}: {rooms}; environment variable HOUSE_LAMP_WATTS: watts must not be 13"


def test_checks_that_do_not_depend_on_each_other_all_run() -> None:
    mistakes = Mistakes()
    mistakes.tell(SimulationError)  # nothing is wrong
    with mistakes.collected():
        raise PolicyError("a: 1")
    with pytest.raises(PolicyError, match=r"^a: 1$"):  # one keeps its kind
        mistakes.tell(SimulationError)
    with mistakes.collected():
        raise ValueError("b: 2")
    with pytest.raises(SimulationError, match=r"^2 mistakes\n  a: 1\n  b: 2$"):
        mistakes.tell(SimulationError)
    with pytest.raises(KeyError), mistakes.collected():  # a bug is no mistake of the user's
        raise KeyError("c")
