"""Options that a command gets as one struct."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option_group(name: str, struct: type[Any], *options: Decorator) -> Decorator:
    """A decorator that adds `options` to a command, which gets their values as one `struct` in its argument `name`.

    The struct is a dataclass whose fields have the names of the options' parameters.
    """
    fields = [field.name for field in dataclasses.fields(struct)]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` also copies the list in which click collects the parameters of the decorators below this one.
        @functools.wraps(function)
        def grouped(**arguments: Any) -> Any:
            values = {field: arguments.pop(field) for field in fields}
            return function(**arguments, **{name: struct(**values)})

        # Decorators are applied from the last to the first, and --help lists the options in the order of the source.
        command: Callable[..., Any] = grouped
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
