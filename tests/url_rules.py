"""Werkzeug compiles two functions for each rule of an application's URLs, with which it makes URLs of that rule.

That is most of what it takes to make the server's application, which tests make hundreds of times and seldom ask for a
URL. So these functions are compiled when they are first called.
"""

from __future__ import annotations

import sys
from typing import Any

RULES = "werkzeug.routing.rules"


def compile_late() -> None:
    """Once Werkzeug is imported. Does nothing before, and nothing the second time."""
    rules = sys.modules.get(RULES)
    if rules is None or hasattr(rules, "compiled_late"):
        return
    compile_builder = rules.Rule._compile_builder

    def late(rule: Any, append_unknown: bool = True) -> Any:
        made: list[Any] = []

        def build(self: Any, **values: Any) -> Any:
            if not made:
                made.append(compile_builder(rule, append_unknown))
            return made[0](self, **values)

        return build

    rules.Rule._compile_builder = late
    rules.compiled_late = True  # type: ignore[attr-defined]
