from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import EligibilityError
from archipel.protocol.eligibility import MAX_CHARACTERS, MAX_DEPTH, parse_eligibility

PHONE: dict[str, str | float | bool] = {
    "ram": 768.0 * 2**20,
    "charging": True,
    "app": "1.4",
    "os": "12.10",
    "country": "CH",
    "battery": 55.0,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ('ram >= 512MiB and charging and app == "1.4"', True),
        ("ram >= 1GB", False),
        ("ram < 805.4MB", True),
        ("charging", True),
        ("not charging", False),
        ("charging == false", False),
        ("battery != 55", False),
        ("battery > -1.5 and battery<=55", True),
        ('os > "12.9"', True),  # as versions; as texts it is below
        ('os == "12.1"', False),
        ('app >= "1.4.0" and app <= "1.4.0"', True),
        ('country in ["CH", "AT"]', True),
        ('country not in ["CH"]', False),
        ('country in ["DE"] or not (battery < 30) and charging', True),
        ("false_name or charging", True),
        ("charging or false_name", True),
        ("false_name and charging", False),
        # What cannot be told is neither true nor false.
        ("missing", False),
        ("not missing", False),
        ("missing == 1", False),
        ("missing != 1", False),
        ("not (missing == 1)", False),
        ('missing not in ["a"]', False),
        ("not (missing and battery == 1)", True),
        ('battery == "55"', False),
        ('battery != "55"', False),
        ("country", False),
        ("charging > 0", False),
        ('country > "1.0"', False),
    ],
)
def test_what_is_eligible(text: str, expected: bool) -> None:
    assert parse_eligibility(text)(PHONE) is expected


def test_an_attribute_may_have_the_name_of_a_word_in_capitals() -> None:
    assert parse_eligibility("OR and not AND")({"OR": True, "AND": False})


def test_names_that_are_read() -> None:
    assert parse_eligibility('ram > 1kB or (not x.y and z in [1, "a"])').names == {"ram", "x.y", "z"}


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        ("ram >", "expected a number", 5),
        ("ram >= 5 MB", 'expected "and", "or" or the end', 9),
        ("ram >= 5mb", "unknown unit 'mb', there are kB, MB", 7),
        ("ram = 5", "not understood", 4),
        ('app == "1.4', 'a text that does not end with "', 7),
        ("(charging", 'expected ")"', 9),
        ("charging)", 'expected "and", "or" or the end', 8),
        ("and", "expected the name of an attribute", 0),
        ("true", "expected the name of an attribute", 0),
        ("x in []", "expected a number", 6),
        ("x in [1", 'expected "]"', 7),
        ("x not 1", 'expected "in"', 6),
        ('app > "beta"', "only numbers and versions", 6),
        ("app > true", "only numbers and versions", 6),
        ("1 < x", "expected the name of an attribute", 0),
        ("x == 1 == 2", 'expected "and", "or" or the end', 7),
        ("__import__('os')", 'expected "and", "or" or the end', 10),
        ("x\n== @", "not understood", 5),
        # What other languages write.
        ("ram = 3", 'not understood; write "=="', 4),
        ("ram => 3", 'not understood; write ">="', 4),
        ("ram =< 3", 'not understood; write "<="', 4),
        ("ram <> 3", 'unequal is "!="', 5),
        ("a && b", 'not understood; write "and"', 2),
        ("a & b", 'not understood; write "and"', 2),
        ("a || b", 'not understood; write "or"', 2),
        ("!a", 'not understood; write "not"', 0),
        ("a AND b", 'write "and", in small letters', 2),
        ("(a Or b)", 'write "or", in small letters', 3),
        ("NOT a", 'write "not", in small letters', 0),
        ("a NOT in [1]", 'write "not", in small letters', 2),
        ("a IN [1]", 'write "in", in small letters', 2),
        ("a == True", 'write "true", in small letters', 5),
        ("country == CH", 'a text stands in quotes: "CH"', 11),
        ("country in [CH]", 'a text stands in quotes: "CH"', 12),
        ("country == 'CH'", 'a text stands in double quotes: "text"', 11),
        ("country == \u201cCH\u201d", 'a text stands in double quotes: "text"', 11),
        ("ram >= 512 MiB", "a unit follows its number at once: 512MiB", 11),
        ("ram < 1e999", "a number has no exponent", 6),
        ("ram < 1E6", "a number has no exponent", 6),
        ("ram < inf", "inf is not finite", 6),
        (f"ram < {'9' * 400}", "too large to be finite", 6),
    ],
)
def test_errors_show_the_place(text: str, message: str, at: int) -> None:
    with pytest.raises(EligibilityError) as caught:
        parse_eligibility(text)
    first, line, mark = str(caught.value).split("\n")
    assert first.startswith("eligibility: ")
    assert message in first
    assert (line, mark) == (f"  {' '.join(text.splitlines())}", f"  {' ' * at}^")


def test_limits() -> None:
    deep = "(" * MAX_DEPTH + "x" + ")" * MAX_DEPTH
    with pytest.raises(EligibilityError, match="nested more than 32 deep"):
        parse_eligibility(deep)
    with pytest.raises(EligibilityError, match="nested more than 32 deep"):
        parse_eligibility("not " * 40 + "x")
    parse_eligibility(deep[1:-1])
    with pytest.raises(EligibilityError, match="1025 characters, at most 1024"):
        parse_eligibility("x" * (MAX_CHARACTERS + 1))


# SQL's logic is the same, and SQLite is a second implementation of it.
NAMES = ("a", "b", "c")
NUMBERS = st.integers(-3, 3)


def expressions() -> st.SearchStrategy[str]:
    compared = st.builds("{} {} {}".format, st.sampled_from(NAMES), st.sampled_from(("==", "!=", "<", ">=")), NUMBERS)
    among = st.builds(
        lambda name, word, numbers: f"{name} {word} [{', '.join(map(str, numbers))}]",
        st.sampled_from(NAMES), st.sampled_from(("in", "not in")), st.lists(NUMBERS, min_size=1, max_size=3),
    )  # fmt: skip
    return st.recursive(
        compared | among,
        lambda inner: (
            st.builds("not ({})".format, inner)
            | st.builds("({} {} {})".format, inner, st.sampled_from(("and", "or")), inner)
        ),
        max_leaves=8,
    )


@pytest.mark.sampled(every=3)
@settings(max_examples=300, derandomize=True, database=None)
@given(expressions(), st.dictionaries(st.sampled_from(NAMES), NUMBERS))
def test_three_valued_logic_is_that_of_sql(text: str, attributes: dict[str, int]) -> None:
    with sqlite3.connect(":memory:") as database:
        columns = ", ".join(f"{attributes.get(name, 'NULL')} AS {name}" for name in NAMES)
        sql = text.replace("[", "(").replace("]", ")")
        expected = database.execute(f"SELECT ({sql}) FROM (SELECT {columns})").fetchone()[0]
    assert parse_eligibility(text)({name: float(value) for name, value in attributes.items()}) is (expected == 1)


CORPUS = Path(__file__).parent / "corpus" / "eligibility.txt"
WORDS = ("and", "or", "not", "in", "true", "x", "1.4", '"1.4"', "512MiB", "==", "<", ">=", "(", ")", "[", "]", ",", " ",
         '"', "\\", "\n", "\0", "é", "-", "1e9", "nan", "x" * 50, "(" * 40, "9" * 400)  # fmt: skip


@pytest.mark.parametrize("cases", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_whatever_is_asked_it_is_an_expression_or_an_error(cases: int) -> None:
    """Kept expressions with pieces cut out, doubled and put in: parsed or refused, and what is parsed can be asked."""
    kept = CORPUS.read_text(encoding="utf-8").splitlines()
    random_ = random.Random(7)
    devices: list[dict[str, str | float | bool]] = [
        {},
        PHONE,
        {"x": True, "y": "1.4", "ram": -1.0},
        {"ram": float("nan"), "app": ""},
    ]
    parsed = 0
    for text in [*kept, *(mutated(random_.choice(kept), random_) for _ in range(cases))]:
        try:
            expression = parse_eligibility(text)
        except EligibilityError:
            continue
        parsed += 1
        assert {expression(device) for device in devices} <= {True, False}
        assert parse_eligibility(f"({text})" if text.strip() and len(text) < 1000 else text)(PHONE) == expression(PHONE)
    assert parsed > 0.1 * cases
    assert parsed < 0.9 * cases


def mutated(text: str, random_: random.Random) -> str:
    for _ in range(random_.randint(1, 3)):
        start = random_.randrange(len(text) + 1)
        stop = min(len(text), start + random_.randint(0, 6))
        kind = random_.randrange(3)
        piece = random_.choice(WORDS) if kind == 0 else text[start:stop] * 2 if kind == 1 else ""
        text = text[:start] + piece + text[stop:]
    return text


@pytest.mark.parametrize(
    ("unit", "worth"),
    [("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12),
     ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40)],
)  # fmt: skip
def test_what_a_unit_is_worth(unit: str, worth: int) -> None:
    """As in IEC 80000-13: powers of 1000 and of 1024."""
    enough = parse_eligibility(f"ram >= 3{unit}")
    assert enough({"ram": 3.0 * worth})
    assert not enough({"ram": 3.0 * worth - 1})
