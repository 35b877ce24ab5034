"""The compression study's bookkeeping: what is kept, intervals, the page. Its measurements are not run here."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "compression"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The report module, and through it the others."""
    monkeypatch.syspath_prepend(FOLDER)
    import report

    return report


def bits(right: np.ndarray) -> str:
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def test_a_result_is_made_once_and_again_for_another_key(study: Any, tmp_path: Path) -> None:
    from cells import Cells

    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"value": len(made)}

    def stopped() -> dict[str, Any]:
        raise KeyboardInterrupt

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        Cells(tmp_path, said.append).get("a", {"seed": 0}, stopped)
    assert list(tmp_path.iterdir()) == []
    for expected, seed in ((1, 0), (1, 0), (2, 1)):
        assert Cells(tmp_path, said.append).get("a", {"seed": seed}, make)["value"] == expected
    assert said == ["a", "a", "a"]  # the one that was stopped, and the two made


def test_the_interval_is_that_of_the_paired_differences(study: Any) -> None:
    from evaluation import difference

    rng = np.random.default_rng(3)
    a, b = rng.random(4000) < 0.9, rng.random(4000) < 0.88
    found = difference([(bits(a), bits(b))], 4000)
    paired = 100 * (b.astype(float) - a)
    # The normal interval of a mean of 4,000 differences; the bootstrap's is within a tenth of it.
    width = 1.96 * paired.std() / np.sqrt(4000)
    assert found.points == pytest.approx(paired.mean())
    assert found.low == pytest.approx(paired.mean() - width, abs=0.1 * width)
    assert found.high == pytest.approx(paired.mean() + width, abs=0.1 * width)


def test_an_example_counts_with_its_mean_over_seeds(study: Any) -> None:
    from evaluation import difference

    a = np.zeros(10, bool)
    b, c = a.copy(), a.copy()
    b[:5], c[5:] = True, True
    found = difference([(bits(a), bits(b)), (bits(a), bits(c))], 10)
    assert found.seeds == (50.0, 50.0)
    # Every example gained one half: whichever are drawn, the mean is the same.
    assert (found.points, found.low, found.high) == (50.0, 50.0, 50.0)


def test_the_page_says_what_is_missed(study: Any) -> None:
    from distillation import Distillation
    from evaluation import Difference
    from floats import Trained
    from schemes import SCHEMES, Failure, Result
    from side_by_side import BASE, OURS, Entry, Table

    less = Difference(-0.61, -0.9, -0.3, (-0.61,))
    result = Result(
        SCHEMES[0], "m", (0,), 90.0, 89.39, less, -0.5, (1000, 300), (900, 250), (5, 5),
        {1: 10.0, 2: 9.0}, {1: 0.5, 2: 0.6}, 3.0, "",
    )  # fmt: skip
    trained = Trained("m", 0, "cifar10", 0.75, 0.8, 0.74, 100, 10, 1000, 60.0, 1, "")
    lift = Distillation("m", (0,), 90.0, 70.0, 70.2, Difference(0.2, -0.4, 0.8, (0.2,)), 0.1, (5, 2), (9, 4), ())
    right = np.arange(100) < 90
    worse = np.arange(100) < 60
    entries = [
        Entry(name, bits(kept), size, size, {1: 10.0, 2: 9.0}, {1: ratio, 2: ratio})
        for name, kept, size, ratio in ((BASE, right, 1000, 1.0), (OURS, worse, 310, 0.8), ("other", right, 300, 2.0))
    ]
    table = Table("m-0", 100, tuple(entries), ("NNCF in OpenVINO: not installed",))
    page = study.markdown(
        study.Study([trained], [result, Failure(SCHEMES[1], "m", "no such part")], [lift], [table], {}, 60.0)
    )
    assert "| m | 1 | 90.00 | 89.39 | -0.61 [-0.90, -0.30] | **no** | 1.0 → 0.3 |" in page
    assert "no result: no such part" in page
    assert "does not lift the student" in page
    assert "As small as it: **no**; as the smallest (other): **no**." in page
    assert "Left out: NNCF in OpenVINO: not installed." in page
    assert "| m | 0 | cifar10 | 10 | 80.00 | 74.00 | 75.0 | **no** | 60 s |" in page
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_every_recipe_of_the_study_can_be_read(study: Any) -> None:
    from archipel.compression import load_recipe

    found = {path.stem: load_recipe(path) for path in (FOLDER / "recipes").glob("*.toml")}
    from schemes import SCHEMES

    assert {scheme.name for scheme in SCHEMES} <= found.keys()
