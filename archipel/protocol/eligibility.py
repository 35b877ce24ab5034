"""Which devices a task is for: a small expression over the attributes that a device reports, parsed strictly.

    ram >= 512MiB and charging and app == "1.4"
    country in ["CH", "AT"] and not (os < "12.1" or battery < 30)

Grammar, `not` binding tighter than `and`, `and` than `or`:

    any     = all { "or" all }
    all     = one { "and" one }
    one     = "not" one | "(" any ")" | name | name op literal | name ["not"] "in" "[" literal { "," literal } "]"
    op      = "==" | "!=" | "<" | "<=" | ">" | ">="
    literal = number [unit] | "text" | true | false          unit: kB MB GB TB (powers of 1000), KiB MiB GiB TiB

Texts that are versions ("1.4", "12.0.3") are ordered as versions; other texts are only equal or not. A comparison with
an attribute that is missing or of another kind is unknown, as in SQL: `not` of it is unknown, too, and a device is
eligible only where the whole expression is true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from archipel.errors import EligibilityError

MAX_CHARACTERS: Final = 1024
MAX_DEPTH: Final = 32
UNITS: Final[Mapping[str, int]] = {
    **{f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("kMGT")},
    **{f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")},
}

Literal = str | float | bool
Attributes = Mapping[str, Literal]
Test = Callable[[Attributes], bool | None]
"""None is unknown."""

_TOKEN: Final = re.compile(
    r"""[ \t\r\n]*(?:
    (?P<number>-?[0-9]+(?:\.[0-9]+)?)(?P<unit>[A-Za-z]*) |
    (?P<text>"[^"\\\x00-\x1f]*") |
    (?P<name>[A-Za-z_][A-Za-z0-9_.-]*) |
    (?P<sign>==|!=|<=|>=|[<>()\[\],]) |
    (?P<end>\Z) )""",
    re.VERBOSE,
)
# At most nine digits: as floats, by which versions are compared, they are exact.
_VERSION: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,7}")
_WORDS: Final = frozenset({"and", "or", "not", "in", "true", "false"})
_ORDERS: Final[Mapping[str, Callable[[int], bool]]] = {
    "==": lambda sign: sign == 0,
    "!=": lambda sign: sign != 0,
    "<": lambda sign: sign < 0,
    "<=": lambda sign: sign <= 0,
    ">": lambda sign: sign > 0,
    ">=": lambda sign: sign >= 0,
}
_SLIPS: Final = (
    ("&", 'write "and"'),
    ("|", 'write "or"'),
    ("!", 'write "not"'),
    ("=>", 'write ">="'),
    ("=<", 'write "<="'),
    ("=", 'write "=="'),
    *((mark, 'a text stands in double quotes: "text"') for mark in ("'", "`", "\u2018", "\u2019", "\u201c", "\u201d")),
)
"""Signs of other languages, and a hint for each; the first that fits is shown."""


@dataclass(frozen=True)
class Eligibility:
    """A parsed expression. `names` are the attributes that it reads."""

    text: str
    names: frozenset[str]
    _test: Test

    def __call__(self, attributes: Attributes) -> bool:
        """Whether a device with these attributes takes part."""
        return self._test(attributes) is True


def parse_eligibility(text: str) -> Eligibility:
    """Read an expression; an empty one is true for every device.

    Raises EligibilityError, which shows the text and marks the place where it is wrong.

    Example:
        parse_eligibility("ram >= 512MiB and charging")({"ram": 2.0**30, "charging": True})
    """
    if len(text) > MAX_CHARACTERS:
        raise EligibilityError(f"eligibility: {len(text)} characters, at most {MAX_CHARACTERS} are allowed")
    if not text.strip():
        return Eligibility(text, frozenset(), lambda attributes: True)
    parser = _Parser(text)
    test = parser.any_of(0)
    if parser.token.kind != "end":
        parser.fail('expected "and", "or" or the end')
    return Eligibility(text, frozenset(parser.names), test)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    unit: str
    at: int


class _Parser:
    """A recursive-descent parser that looks one token ahead; its methods make closures, which are the test."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokenize(text)
        self.names: set[str] = set()
        self._last = self.token = next(self._tokens)

    def any_of(self, depth: int) -> Test:
        return self._joined("or", self._all_of, depth, decisive=True)

    def _all_of(self, depth: int) -> Test:
        return self._joined("and", self._one, depth, decisive=False)

    def _joined(self, word: str, part: Callable[[int], Test], depth: int, decisive: bool) -> Test:
        parts = [part(depth)]
        while self._take(word):
            parts.append(part(depth))
        return parts[0] if len(parts) == 1 else lambda attributes: _join(parts, attributes, decisive)

    def _one(self, depth: int) -> Test:
        # Bounded, so that no expression from outside exhausts Python's stack, here or when it is evaluated.
        if depth >= MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} deep")
        if self._take("not"):
            inner = self._one(depth + 1)
            return lambda attributes: None if (result := inner(attributes)) is None else not result
        if self._take("("):
            inner = self.any_of(depth + 1)
            self._need(")")
            return inner
        token = self.token
        if token.kind != "name" or token.text in _WORDS:
            self.fail("expected the name of an attribute")
        self._next()
        self.names.add(token.text)
        return self._about(token.text)

    def _about(self, name: str) -> Test:
        operator = self.token.text
        if self.token.kind == "sign" and operator in _ORDERS:
            self._next()
            place, literal = self.token, self._literal()
            # An error here reaches the author. On the devices the comparison would only be unknown, and no device
            # eligible.
            if operator not in ("==", "!=") and not _ordered(literal):
                self.fail('only numbers and versions such as "1.4" have an order', place)
            return lambda attributes: _compare(attributes.get(name), operator, literal)
        if self._take("in"):
            return self._among(name)
        if self.token.text == "not" and self.token.kind == "name":
            self._next()
            self._need("in")
            inner = self._among(name)
            return lambda attributes: None if (result := inner(attributes)) is None else not result
        return lambda attributes: value if isinstance(value := attributes.get(name), bool) else None

    def _among(self, name: str) -> Test:
        self._need("[")
        literals = [self._literal()]
        while self._take(","):
            literals.append(self._literal())
        self._need("]")
        tests = [_equal(name, literal) for literal in literals]
        return lambda attributes: _join(tests, attributes, decisive=True)

    def _literal(self) -> Literal:
        token = self.token
        if token.kind == "text":
            self._next()
            return token.text[1:-1]
        if token.kind == "name" and token.text in ("true", "false"):
            self._next()
            return token.text == "true"
        if token.kind != "number":
            message = 'expected a number, a "text", true or false'
            if token.kind == "name" and token.text not in _WORDS:
                finite = token.text.lower() not in ("nan", "inf", "infinity")
                message += f'; a text stands in quotes: "{token.text}"' if finite else f"; {token.text} is not finite"
            self.fail(message + ('; unequal is "!="' if self._last.text + token.text == "<>" else ""))
        # The pattern reads "1e6" as the number 1 with the unit "e".
        if token.unit in ("e", "E"):
            self.fail("a number has no exponent, write its digits or a unit")
        if token.unit and token.unit not in UNITS:
            self.fail(f"unknown unit {token.unit!r}, there are {', '.join(UNITS)}")
        number = float(token.text) * UNITS.get(token.unit, 1)
        # MAX_CHARACTERS leaves room for more digits than a float can have.
        if not math.isfinite(number):
            self.fail("the number is too large to be finite")
        self._next()
        return number

    def _take(self, text: str) -> bool:
        matches = self.token.kind in ("name", "sign") and self.token.text == text
        if matches:
            self._next()
        return matches

    def _need(self, text: str) -> None:
        if not self._take(text):
            self.fail(f'expected "{text}"')

    def _next(self) -> None:
        self._last, self.token = self.token, next(self._tokens)

    def fail(self, message: str, token: _Token | None = None) -> NoReturn:
        """Raise EligibilityError at `token` (None: the present one), with a hint where the mistake is a usual one."""
        token = token or self.token
        # AND for `and` is a name to the parser, which fails there or at the token after it.
        for suspect in (token, self._last):
            word = suspect.text.lower()
            if suspect.kind == "name" and word in _WORDS and suspect.text != word:
                _fail(self._text, suspect.at, f'write "{word}", in small letters')
        if token.kind == "name" and token.text in UNITS and self._last.kind == "number":
            message += f"; a unit follows its number at once: {self._last.text}{token.text}"
        _fail(self._text, token.at, message)


def _tokenize(text: str) -> Iterator[_Token]:
    at = 0
    while True:
        match = _TOKEN.match(text, at)
        if match is None:
            # The pattern skips white space before a token; the mark goes below the character that is wrong.
            start = at + len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
            slip = next((hint for sign, hint in _SLIPS if text.startswith(sign, start)), "")
            what = 'a text that does not end with "' if text[start] == '"' else "not understood"
            _fail(text, start, f"{what}; {slip}" if slip else what)
        # `lastgroup` is the group that matched last: for a number that is its unit, which may be empty.
        kind = match.lastgroup if match.lastgroup != "unit" else "number"
        token = _Token(str(kind), match.group(str(kind)), match.group("unit") or "", match.start(str(kind)))
        at = match.end()
        yield token
        # The end again and again: the parser may look beyond it.
        while kind == "end":
            yield token


def _join(parts: list[Test], attributes: Attributes, decisive: bool) -> bool | None:
    """Kleene's three-valued `or` (`decisive` True) and `and` (False): a decisive part decides, else an unknown one."""
    joined: bool | None = not decisive
    for part in parts:
        result = part(attributes)
        if result is decisive:
            return decisive
        joined = None if result is None else joined
    return joined


def _compare(value: Literal | None, operator: str, literal: Literal) -> bool | None:
    """None where the two are of different kinds, or have no order."""
    if value is None or _kind(value) != _kind(literal):
        return None
    if operator in ("==", "!="):
        return (value == literal) is (operator == "==")
    left, right = _ordered(value), _ordered(literal)
    if left is None or right is None:
        return None
    return _ORDERS[operator]((left > right) - (left < right))


def _equal(name: str, literal: Literal) -> Test:
    return lambda attributes: _compare(attributes.get(name), "==", literal)


def _kind(value: Literal) -> str:
    # Python's bool is an int, and True == 1; here `charging == 1` is unknown.
    return "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def _ordered(value: Literal) -> tuple[float, ...] | None:
    """A key by which numbers, or versions without final zeros ("1.0" is "1"), are ordered; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        if not _VERSION.fullmatch(value):
            return None
        numbers = [float(part) for part in value.split(".")]
        while len(numbers) > 1 and numbers[-1] == 0:
            numbers.pop()
        return tuple(numbers)
    return (float(value),) if math.isfinite(value) else None


def _fail(text: str, at: int, message: str) -> NoReturn:
    # White space of any kind as one blank each, so that the mark stands below its place.
    line = re.sub(r"\s", " ", text)
    raise EligibilityError(f"eligibility: {message}\n  {line}\n  {' ' * at}^")
