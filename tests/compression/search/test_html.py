from __future__ import annotations

import re
from pathlib import Path

import pytest

from archipel.compression import FineTune, Report, Step
from archipel.compression.html import write_report, write_search_report
from archipel.compression.report import Measured
from archipel.compression.search import Metrics, Point, SearchResult, parse_target

HOSTILE = "<script>alert(1)</script>"


def outside(page: str) -> list[str]:
    """What a browser would fetch: nothing but places in the page itself may be named."""
    return re.findall(r"<(?:script|link|iframe|img)\b|(?:src|href)=\"(?!#)[^\"]*|url\((?!#)[^)]*|@import", page)


def measured(nbytes: int, accuracy: float | None) -> Measured:
    return Measured(nbytes, nbytes - 100, 1000, 123_456, 0.25, accuracy)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("accuracy", [0.9712, None])
def test_a_run(tmp_path: Path, accuracy: float | None) -> None:
    facts = {
        "training": {HOSTILE: {"steps": 7, "last loss": 0.123456789}, "b": {"steps": 9}},
        "dense": {"w": "too few channels"},
        "flops": [10, 5],
        "nothing": {},
    }
    steps = (
        Step("FineTune(epochs=2)", 1.25, measured(45_678, accuracy), facts),
        Step("Other()", 2.0, measured(9, accuracy)),
    )
    write_report(Report(f"# {HOSTILE}", measured(98_765, accuracy), steps, 3), tmp_path / "r.html", HOSTILE)
    page = (tmp_path / "r.html").read_text()
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert outside(page) == []
    for text in (
        "98,765",
        "45,678",
        "0.12346",
        "too few channels",
        "10, 5",
        "nothing: none",
        "It noted nothing",
        "Seed 3",
    ):
        assert text in page, text
    assert ("97.12%" in page) is (accuracy is not None)
    assert page.count("<svg") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def result(accuracy: float | None, target: str, tmp_path: Path) -> SearchResult:
    def metrics(nbytes: int, points: float, ratio: float) -> Metrics:
        value = None if accuracy is None else accuracy + points / 100
        return Metrics(nbytes, nbytes, 100, 5_000_000, 0.5 - points / 100, value, 100 * ratio, ratio)

    points = [
        Point(number, tmp_path / str(number), (FineTune(epochs=number),), 7, metrics(*values), 1.5)
        for number, values in enumerate([(50_000, -0.25, 0.5), (40_000, -3.0, 0.5), (60_000, -0.5, 0.75)], 1)
    ]
    failed = (("a recipe", f"it cannot: {HOSTILE}"),)
    return SearchResult(parse_target(target), metrics(100_000, 0, 1.0), tuple(points), failed, tmp_path, 7)


@pytest.mark.sampled(every=4)
def test_a_search(tmp_path: Path) -> None:
    found = result(0.95, "size<55kB, accuracy>=-0.5", tmp_path)
    write_search_report(found, tmp_path / "s.html", HOSTILE)
    page = (tmp_path / "s.html").read_text()
    assert HOSTILE not in page
    assert outside(page) == []
    assert "point 1 meets size&lt;55kB, accuracy&gt;=-0.5: FineTune" in page
    assert page.count('class="met"') == 1
    assert page.count("<svg") == 3
    assert "accuracy on the validation data, %" in page
    assert "kB of the ONNX file" in page
    assert "latency, of the original" in page
    rows = re.findall(r"<tr.*?</tr>", page, re.S)
    assert any("50,000" in row and "size latency" in row for row in rows)
    assert any("40,000" in row and "accuracy&gt;=-0.5" in row for row in rows)
    assert any("60,000" in row and "size&lt;55kB" in row for row in rows)
    assert "epochs = 3" in page
    assert "it cannot" in page


@pytest.mark.sampled(every=3)
def test_a_search_by_loss_that_meets_nothing(tmp_path: Path) -> None:
    write_search_report(result(None, "size<1kB", tmp_path), tmp_path / "s.html")
    page = (tmp_path / "s.html").read_text()
    assert "no point meets size&lt;1kB; the nearest is point 2" in page
    assert "loss on the validation data" in page
    assert 'class="met"' not in page


def test_what_is_best_depends_on_what_is_bounded(tmp_path: Path) -> None:
    """Within a size the most accurate; within an accuracy the smallest."""
    best = {target: result(0.95, target, tmp_path).best for target in ("size<=60kB", "accuracy>=-4", "size<45kB")}
    assert {target: point and point.number for target, point in best.items()} == {
        "size<=60kB": 1, "accuracy>=-4": 2, "size<45kB": 2,
    }  # fmt: skip
    assert [p.number for p in result(0.95, "size<1B", tmp_path).front("size")] == [2, 1]
    assert [p.number for p in result(0.95, "size<1B", tmp_path).front("latency")] == [1]


def test_without_points(tmp_path: Path) -> None:
    found = result(0.95, "size<1kB", tmp_path)
    empty = SearchResult(found.target, found.original, (), found.failed, tmp_path, 7)
    write_search_report(empty, tmp_path / "s.html")
    assert "no recipe could be applied" in (tmp_path / "s.html").read_text()
    assert empty.nearest is None
