"""The compression study's bookkeeping: what is kept, intervals, the page. Its measurements are not run here."""

from __future__ import annotations

import base64
import re
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "compression"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The report module, and through it the others."""
    monkeypatch.syspath_prepend(FOLDER)
    import report

    return report


def bits(right: np.ndarray) -> str:
    return base64.b64encode(np.packbits(right).tobytes()).decode()


@pytest.mark.sampled(every=4)
def test_a_result_is_made_once_and_again_for_another_key(study: ModuleType, tmp_path: Path) -> None:
    from cells import Cells

    made: list[int] = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"value": len(made)}

    def stopped() -> dict[str, int]:
        raise KeyboardInterrupt

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        Cells(tmp_path, said.append).get("a", {"seed": 0}, stopped)
    assert list(tmp_path.iterdir()) == []
    for expected, seed in ((1, 0), (1, 0), (2, 1)):
        assert Cells(tmp_path, said.append).get("a", {"seed": seed}, make)["value"] == expected
    assert said == ["a", "a", "a"]  # the one that was stopped, and the two made


@pytest.mark.sampled(every=3)
def test_the_interval_is_that_of_the_paired_differences(study: ModuleType) -> None:
    from evaluation import difference

    rng = np.random.default_rng(3)
    a, b = rng.random(4000) < 0.9, rng.random(4000) < 0.88
    found = difference([(bits(a), bits(b))], 4000)
    paired = 100 * (b.astype(float) - a)
    # The normal interval of a mean of 4,000 differences; ours is within a tenth of it.
    width = 1.96 * paired.std() / np.sqrt(4000)
    assert found.points == pytest.approx(paired.mean())
    assert found.low == pytest.approx(paired.mean() - width, abs=0.1 * width)
    assert found.high == pytest.approx(paired.mean() + width, abs=0.1 * width)


def test_models_that_agree_on_every_example_may_differ_on_others(study: ModuleType) -> None:
    from evaluation import difference

    same = bits(np.ones(98, bool))
    found = difference([(same, same)], 98)
    # By hand: 1.959964 sqrt(0.5 + 0.5) / (98 + 2).
    assert (found.points, found.low, found.high) == (0.0, pytest.approx(-1.959964), pytest.approx(1.959964))


def test_an_example_counts_with_its_mean_over_seeds(study: ModuleType) -> None:
    from evaluation import difference

    a = np.zeros(10, bool)
    b, c = a.copy(), a.copy()
    b[:5], c[5:] = True, True
    found = difference([(bits(a), bits(b)), (bits(a), bits(c))], 10)
    assert found.seeds == (50.0, 50.0)
    # Every example gained one half: whichever are drawn, the mean is the same.
    assert (found.points, found.low, found.high) == (50.0, 50.0, 50.0)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-0.5, 0.1, "yes"), (-0.4, -0.2, "yes"), (-0.6, -0.4, "open"), (-0.9, -0.5, "open"), (-0.9, -0.51, "no")],
)
def test_the_interval_decides_whether_a_limit_is_met(study: ModuleType, low: float, high: float, expected: str) -> None:
    """At most half a point lost: the interval's ends on the limit itself are within it."""
    from verdict import at_least, at_most

    assert at_least(-0.5, low, high) == expected
    assert at_most(0.5, -high, -low) == expected


def test_ends_that_are_the_limit_but_for_rounding_are_the_limit(study: ModuleType) -> None:
    from verdict import at_least

    assert at_least(-0.3, -(0.1 + 0.2), 0.0) == "yes"  # 0.1 + 0.2 is 0.30000000000000004
    assert at_least(-0.3, -0.300001, 0.0) == "open"


@pytest.mark.parametrize(
    ("given", "expected"),
    [(("yes",), "yes"), (("yes", "open"), "open"), (("no", "open"), "no"), (("open", "yes", "no"), "no")],
)
def test_the_stricter_of_several(study: ModuleType, given: tuple[str, ...], expected: str) -> None:
    from verdict import stricter

    assert stricter(*given) == expected


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_score_interval_of_a_share(study: ModuleType, right: int, of: int, low: float, high: float) -> None:
    from verdict import wilson

    assert wilson(right / of, of) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("count", "rank"),
    # Ranks of the 95% interval of a median as tables of the sign test give them (Conover 1999, table A3).
    [(5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (21, 6), (25, 8)],
)
def test_the_interval_of_a_median_is_of_order_statistics(study: ModuleType, count: int, rank: int) -> None:
    from verdict import median_interval

    values = [float(value) for value in np.random.default_rng(0).permutation(np.arange(1, count + 1))]
    assert median_interval(values) == (rank, count + 1 - rank)


def test_divergence_of_two_answers(study: ModuleType) -> None:
    from evaluation import divergence

    before, after = np.log([[0.5, 0.5], [0.25, 0.75]]), np.log([[0.5, 0.5], [0.5, 0.5]])
    # (0 + 0.25 ln 0.5 + 0.75 ln 1.5) / 2, by hand; logits may be moved by any constant.
    expected = (0.25 * -0.693147181 + 0.75 * 0.405465108) / 2
    assert divergence(before + 3.0, after - 1.0) == pytest.approx(expected, rel=1e-7)


def test_a_control_gets_the_training_and_nothing_else(study: ModuleType) -> None:
    from control import control_parts

    from archipel.compression import Distil, FineTune, PruneChannels, QuantizationAware, StaticInt8, WeightOnly

    short, long = FineTune(steps=300, lr=1e-3, augment="shift_flip"), FineTune(steps=5000, lr=4e-3)
    assert control_parts([PruneChannels(flops=0.5, iterations=2, fine_tune=short), Distil(fine_tune=long)]) == [
        short,
        short,
        Distil(fine_tune=long),
    ]
    # Rounding freezes the statistics of BatchNormalization, so its control does.
    assert control_parts([StaticInt8(), QuantizationAware(short)]) == [
        FineTune(steps=300, lr=1e-3, augment="shift_flip", batch_norm="frozen")
    ]
    assert control_parts([PruneChannels(flops=0.5), long]) == [long]
    with pytest.raises(ValueError, match="WeightOnly: no rule"):
        control_parts([WeightOnly(bits=4)])


def test_a_scheme_that_trains_must_keep_within_its_limit_against_both(study: ModuleType) -> None:
    from evaluation import Difference
    from schemes import SCHEMES, Result

    aware = SCHEMES[1]
    assert (aware.trains, aware.limit) == (True, 0.2)
    better, worse = Difference(0.4, 0.1, 0.7, (0.4,)), Difference(-0.1, -0.3, 0.1, (-0.1,))

    def verdict(change: Difference, control: Difference | None) -> str:
        return Result(aware, "m", (0,), 90.0, 90.4, change, None, control, (1, 1), (1, 1), (1, 1), {}, "").reached

    assert (verdict(better, None), verdict(better, better)) == ("yes", "yes")
    assert (verdict(better, worse), verdict(worse, better)) == ("open", "open")
    assert verdict(better, Difference(-0.9, -1.0, -0.8, (-0.9,))) == "no"


def test_what_is_kept_has_a_stamp_and_what_is_missing_is_not_made(study: ModuleType, tmp_path: Path) -> None:
    from cells import Cells, Missing

    def make() -> dict[str, int]:
        return {"value": 1}

    with pytest.raises(Missing, match=r"^b$"):
        Cells(tmp_path, print, make=False).get("b", {}, make)
    Cells(tmp_path, print).get("b", {}, make)
    reader = Cells(tmp_path, print, make=False)
    assert reader.get("b", {}, make)["value"] == 1
    (found,) = reader.stamps
    assert found["versions"]["numpy"] == np.__version__


def test_a_stamp_says_when_files_differ_from_the_commit(study: ModuleType, tmp_path: Path) -> None:
    import stamp

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    found = [stamp.stamp.__wrapped__(tmp_path)]
    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    found.append(stamp.stamp.__wrapped__(tmp_path))
    (tmp_path / "file").write_text("two")
    found.append(stamp.stamp.__wrapped__(tmp_path))
    commit = git("rev-parse", "HEAD")[:12]
    assert [(each["commit"], each["clean"]) for each in found] == [("unknown", False), (commit, True), (commit, False)]
    assert f"commit {commit}, on" in stamp.described(found[1:2])
    assert f"commit {commit}, {commit} **with uncommitted changes**, on" in stamp.described(found[1:])


def page_of_what_is_missed(study: ModuleType) -> str:
    from distillation import Distillation
    from evaluation import Difference
    from floats import Trained
    from latency import Latency
    from schemes import SCHEMES, Failure, Result
    from side_by_side import Entry, Table

    def at(ratio: float) -> dict[int, Latency]:
        return {threads: Latency(10.0, ratio, ratio - 0.01, ratio + 0.01) for threads in (1, 2)}

    fewer, around = Difference(-0.61, -0.9, -0.51, (-0.61,)), Difference(-0.1, -0.3, 0.1, (-0.1,))
    sizes = ((1000, 300), (900, 250), (5, 5))
    made = {"date": "2026-01-02", "commit": "abc", "clean": False, "processor": "2 x P", "versions": {"numpy": "1.2"}}
    stamp = {**made, "commit": "def", "clean": True}
    results = [
        Result(SCHEMES[0], "m", (0,), 90.0, 89.39, fewer, None, None, *sizes, at(0.5), ""),
        Result(SCHEMES[1], "m", (0,), 90.0, 89.9, around, 90.0, around, *sizes, at(0.5), ""),
        Failure(SCHEMES[2], "m", "no such part"),
    ]
    trained = Trained("m", 0, "cifar10", 0.75, 0.8, 0.76, 400, 10, 1000, 60.0, 1, "", stamp)
    lift = Distillation("m", (0,), 90.0, 70.0, 70.2, Difference(0.2, -0.4, 0.8, (0.2,)), 0.1, (5, 2), (9, 4), ())
    right, worse = np.arange(100) < 90, np.arange(100) < 60
    entries = (
        Entry("float, archipel", "", bits(right), 1000, 1000, at(1.0)),
        Entry("archipel, chosen: a", "archipel", bits(worse), 290, 310, at(0.75), chosen=True),
        Entry("archipel, default: b", "archipel", bits(worse), 100, 100, at(0.2), default=True),
        Entry("other, default: c", "other", bits(right), 300, 305, at(0.6), default=True),
        Entry("other, chosen: d", "other", bits(worse), 310, 300, at(2.0), chosen=True),
    )
    table = Table("m-0", 100, entries, ("NNCF: not installed",), {"other": {"d": 0.5, "c": 1.25}}, {"nncf": "9.9"})
    page: str = study.markdown(study.Study([trained], results, [lift], [table], {}, [made], [stamp]))
    return page


def test_the_page_says_what_is_missed(study: ModuleType) -> None:
    page = page_of_what_is_missed(study)
    assert "| m | 1 | 90.00 | 89.39 | -0.61 [-0.90, -0.51] | **no** | 1.0 → 0.3 |" in page
    # Its point estimate is within the limit, its interval is not.
    assert "| m | 1 | 90.00 | 89.90 | -0.10 [-0.30, +0.10] | 90.00 | -0.10 [-0.30, +0.10] | **open** |" in page
    assert "no result: no such part" in page
    assert "| +0.20 [-0.40, +0.80] | +0.20 | **no** |" in page
    # Wilson, 304 of 400 by hand: 0.757527 -+ 0.041727.
    assert "| m | 0 | cifar10 | 10 | 80.00 | 76.00 [71.58, 79.93] | 75.0 | **open** |" in page
    assert "accuracy at least that of the best of the others (other, default: c): **no**, -30.00 [" in page
    assert (
        "Zipped no larger than that one: **no**, 0.3 to 0.3 kB; than the smallest of the others (other, chosen: d)"
        in page
    )
    assert "Latency at most 0.75 of float on 1 thread: **open**." in page
    assert "Left out: NNCF: not installed." in page
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_page_begins_with_what_is_not_met_and_where_others_are_better(study: ModuleType) -> None:
    head, _ = page_of_what_is_missed(study).split("## Float models")
    assert max(len(line) for line in head.splitlines() if not line.startswith("|")) <= 120
    head = head.replace("\n  ", " ")
    assert "6 verdicts by intervals: 0 yes, 3 open, 3 no." in head
    assert "- m, int8 after training, at most 0.5 points lost: -0.61 [-0.90, -0.51]\n" in head
    again = "-0.10 [-0.30, +0.10]; against the fine-tuned float -0.10 [-0.30, +0.10]"
    assert (
        f"- m, int8, trained with rounding, at most 0.2 points lost: {again} (the point estimate alone would say yes)"
        in head
    )
    assert "- m-0, zipped kB: ours 0.3, 0.3 (other, chosen: d); 0.3 (other, default: c)" in head
    assert (
        "- m-0, latency to float on 1 thread: ours 0.75 [0.74, 0.76], 0.60 [0.59, 0.61] (other, default: c)\n" in head
    )


def test_the_page_says_of_which_commit_machine_and_libraries_it_is(study: ModuleType) -> None:
    head, _ = page_of_what_is_missed(study).split("## In short")
    assert "- Float models: 2026-01-02, commit def, on 2 x P.\n" in head
    assert "- Compression and accuracy: 2026-01-02, commit abc **with uncommitted changes**, on 2 x P.\n" in head
    assert "- Latency: 2026-01-02, commit def, on 2 x P.\n" in head
    assert "- numpy 1.2, nncf 9.9.\n" in head
    assert "- **Only a part of the study**: without digits-cnn, har-cnn, " in head


def test_every_recipe_of_the_study_can_be_read(study: ModuleType) -> None:
    from archipel.compression import load_recipe

    found = {path.stem: load_recipe(path) for path in (FOLDER / "recipes").glob("*.toml")}
    from schemes import SCHEMES

    assert {scheme.name for scheme in SCHEMES} <= found.keys()
