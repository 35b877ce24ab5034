"""Errors of the Python functions behind a command, in the words of the command: options in place of arguments.

Functions name their arguments as Python writes them (`batch_size=2`, "training: epochs: expected ..."). A command has a
list of rules that says which of its options each of them is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archipel.errors import ArchipelError, CommandError

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
"""What is replaced, by what: as for `re.sub`."""

_VALUE = r"""'(?P<text>[^']*)'|(?P<plain>-?\d[\w.+-]*)|(?P<rest>)"""


def rule(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Rule:
    return re.compile(pattern), replacement


def argument_rules(arguments: Mapping[str, str], groups: Sequence[str]) -> list[Rule]:
    """The rules for arguments by name, with their options.

    They change `NAME=` and `NAME=value`, `NAME: ` or `GROUP: NAME is` where a text begins so, and names that no word of
    English can be, since they have an underscore.
    """
    names = "|".join(sorted(map(re.escape, arguments), key=len, reverse=True))

    def option(match: re.Match[str]) -> str:
        value = match["text"] or match["plain"]
        return arguments[match["name"]] + (f" {value}" if value else "")

    return [
        # Not inside an option's own value, such as `--strategy-option seed=1` or `proximal:anchor=start`.
        rule(rf"(?<![\w.:=-])(?<!-option )(?P<name>{names})=(?:{_VALUE})", option),
        rule(rf"^(?:(?:{'|'.join(groups)}): )*(?P<name>{names})(?=: )", lambda match: arguments[match["name"]]),
        rule(rf"^(?:(?:{'|'.join(groups)}): )+(?P<name>{names})(?= must| is | goes )",
             lambda match: arguments[match["name"]]),
        rule(r"(?<![\w.:='\"/-])(?<!-option )(?P<name>[a-z]+(?:_[a-z]+)+)(?![\w.='\"/])",
             lambda match: arguments.get(match["name"], match["name"])),
    ]  # fmt: skip


def spelled(text: str, rules: Sequence[Rule]) -> str:
    """The text after all rules, one after the other."""
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def spells_options(rules: Sequence[Rule]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a command's function: the errors that it raises name options, as `rules` spell them."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**arguments: Any) -> None:
            try:
                function(**arguments)
            except CommandError:
                raise  # written for the command
            except ArchipelError as error:
                text = spelled(str(error), rules)
                if text == str(error):
                    raise
                raise CommandError(text) from error

        return command

    return decorate
