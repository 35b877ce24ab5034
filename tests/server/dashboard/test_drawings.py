"""Charts, the lineage and forms as data: where points lie, what axes say, and what texts become."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from archipel.errors import InvalidRequestError
from archipel.protocol.mistakes import split
from archipel.server.dashboard.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw
from archipel.server.dashboard.forms import Field, read_form, spell_refusal
from archipel.server.dashboard.lineage import draw_lineage
from archipel.server.dashboard.rendering import mark_commands, write_number, write_size, write_span


def test_points_lie_where_the_axes_say() -> None:
    chart = draw("loss", {"loss": [(1, 2.0), (2, 1.5), (3, float("nan")), (5, 0.0)]})
    (line,) = chart.lines
    # By hand: x from 1 to 5 over the width, y from 0 to 2 over the height, both without the margins.
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    expected = [(LEFT, TOP), (LEFT + across / 4, TOP + down / 4), (LEFT + across, TOP + down)]
    assert [(x, y) for x, y, _ in line.points] == [pytest.approx(point, abs=0.05) for point in expected]
    assert chart.y_ticks[0].at == pytest.approx(TOP + down, abs=0.05)
    assert [tick.label for tick in chart.y_ticks] == ["0", "0.5", "1", "1.5", "2"]
    assert [tick.label for tick in chart.x_ticks] == ["1", "2", "3", "4", "5"]
    assert chart.rows == ((1, (2.0,)), (2, (1.5,)), (5, (0.0,)))
    assert chart.summary == "loss: loss goes from 2 in round 1 to 0 in round 5."


@pytest.mark.parametrize(
    "points",
    [[(1, 0.0)], [(7, -3.5)], [(1, 1e-9), (2, 3e-9)], [(1, 1e12), (2, -1e12)], [(n, n % 3) for n in range(500)]],
)
def test_every_point_lies_within_the_drawing(points: list[tuple[float, float]]) -> None:
    (line,) = draw("x", {"x": points}).lines
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", line.path)]
    assert len(numbers) == 2 * len(points)
    assert all(LEFT <= x <= WIDTH - RIGHT for x in numbers[::2])
    assert all(TOP <= y <= HEIGHT - BOTTOM for y in numbers[1::2])


def test_nothing_to_draw_is_no_chart() -> None:
    assert draw("x", {"x": [], "y": [(1, float("inf"))]}).lines == ()


@dataclass(frozen=True)
class Version:
    number: int
    parent: int | None
    state: str = "registered"


def test_versions_stand_right_of_the_one_they_were_made_from() -> None:
    #  1 - 2 - 4
    #    \ 3 - 5      6 alone
    versions = [Version(6, None), *(Version(*each) for each in ((1, None), (2, 1), (3, 1), (4, 2), (5, 3)))]
    drawn = draw_lineage(versions)
    places = {node.number: (node.x, node.y) for node in drawn.nodes}
    columns = [sorted(n for n, (x, _) in places.items() if x == at) for at in sorted({x for x, _ in places.values()})]
    assert columns == [[1, 6], [2, 3], [4, 5]]
    lanes = [sorted(n for n, (_, y) in places.items() if y == at) for at in sorted({y for _, y in places.values()})]
    assert lanes == [[1, 2, 4], [3, 5], [6]]
    assert len(drawn.edges) == 4
    assert max(x for x, _ in places.values()) < drawn.width
    assert max(y for _, y in places.values()) < drawn.height
    assert draw_lineage([Version(2, 9), Version(3, 3)]).edges == ()


FIELDS = (
    Field("name", "Name", required=True), Field("rounds", "Rounds", "whole"), Field("loss", "Loss", "real"),
    Field("kind", "Kind", "choice", options=("a", "b")), Field("metrics", "Metrics", "pairs"),
    Field("stages", "Stages", "stages"), Field("more", "More", "json"),
)  # fmt: skip


def test_what_is_typed_becomes_what_the_api_takes() -> None:
    form = {
        "name": " spring ", "rounds": "12", "loss": "0.5", "kind": "b", "metrics": "accuracy 1, training loss = 10",
        "stages": "5 % for 1 h\n\n25% 90 s\n100 for 2 d", "more": '{"rest_seconds": 3600}', "unknown": "x",
    }  # fmt: skip
    assert read_form(FIELDS, form) == {
        "name": "spring", "rounds": 12, "loss": 0.5, "kind": "b", "metrics": {"accuracy": 1.0, "training loss": 10.0},
        "stages": [
            {"percent": 5.0, "soak_seconds": 3600.0}, {"percent": 25.0, "soak_seconds": 90.0},
            {"percent": 100.0, "soak_seconds": 172800.0},
        ],
        "more": {"rest_seconds": 3600},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("name", "  "), ("rounds", "1.5"), ("rounds", "9" * 5000), ("loss", "much"), ("kind", "c"),
        ("metrics", "accuracy"),
        ("stages", "half"), ("stages", "5 % for 1 week"), ("more", "[1]"), ("more", "{"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_the_fields_label(name: str, text: str) -> None:
    label = {field.name: field.label for field in FIELDS}[name]
    with pytest.raises(InvalidRequestError, match=f"^{label}: "):
        read_form(FIELDS, {"name": "spring", name: text})


def test_all_that_is_wrong_is_told() -> None:
    with pytest.raises(InvalidRequestError) as told:
        read_form(FIELDS, {"rounds": "many", "loss": "much", "kind": "b"})
    assert split(str(told.value)) == [
        "Name: is missing", "Rounds: expected a whole number, got 'many'", "Loss: expected a number, got 'much'",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("Expected `int` >= 1 - at `$.rounds`", "Rounds: expected a whole number of at least 1, got '0'"),
        ("Expected `int` <= 100000 - at `$.rounds`", "Rounds: expected a whole number of at most 100000, got '0'"),
        ("Expected `float` > 0.0 - at `$.rounds[...]`", "Rounds: expected a number above 0.0, got '0'"),
        ("Expected `float` - at `$.rounds`", "Rounds: expected a number, got '0'"),
        ("Expected `str` of length >= 1 - at `$.rounds`", "Rounds: Expected `str` of length >= 1, got '0'"),
        ("too many - at `$.elsewhere`", "too many - at `$.elsewhere`"),
        ("there is no such bundle", "there is no such bundle"),
    ],
)
def test_what_the_api_refuses_is_told_in_words(told: str, shown: str) -> None:
    assert spell_refusal(FIELDS, {"rounds": "0"}, told) == shown


def test_numbers_are_written_for_people() -> None:
    assert [write_number(each) for each in (None, 0, 1234567, 0.123456, 2.0, float("nan"))] == [
        "–", "0", "1\u202f234\u202f567", "0.1235", "2", "nan",
    ]  # fmt: skip
    assert [write_size(each) for each in (None, 0, 1023, 1024, 5 << 20, 3 << 50)] == [
        "–", "0 bytes", "1023 bytes", "1.0 KiB", "5.0 MiB", "3072.0 TiB",
    ]  # fmt: skip
    assert [write_span(each) for each in (None, 0, 0.25, 1, 90, 7200, 3 * 86400)] == [
        "–", "0 s", "250 ms", "1 s", "2 min", "2 h", "3 days",
    ]  # fmt: skip
    assert mark_commands("ask `x <y>` & go") == "ask <code>x &lt;y&gt;</code> &amp; go"
