"""The tree at the top of archipel/errors.py is that of the classes below it."""

from __future__ import annotations

import inspect
import re

from archipel import errors


def test_the_tree_names_every_error_under_its_parent() -> None:
    told, path = {}, ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"((?:[│├└ ─]{4})*)(\w+Error)\b", line):
            depth = len(found[1]) // 4
            path = [*path[: depth + 1], found[2]]
            told[found[2]] = path[-2]
    classes = {
        name: each for name, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__
    }
    assert told == {name: each.__base__.__name__ for name, each in classes.items()}
