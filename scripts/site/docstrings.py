"""An extension of griffe: the `Example:` of a docstring is code, and is shown as code.

`Example: see` names of archipel, and becomes links to them.
"""

from __future__ import annotations

import re
import textwrap

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)Example:\n(?P<code>(?:(?P=indent) {4,}.*\n|\n)+)", re.M)
POINTER = re.compile(r"^ *Example: see .+$", re.M)


class Examples(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Puts fences around the code of every `Example:`, and makes links of the names that it points to."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = link_examples(fence_examples(obj.docstring.value))


def fence_examples(text: str) -> str:
    """The docstring with fences around the code of its `Example:`, and everything else as it was."""

    def fenced(found: re.Match[str]) -> str:
        code = textwrap.dedent(found["code"]).strip("\n")
        lines = ["```python", *code.splitlines(), "```"]
        indented = textwrap.indent("\n".join(lines), found["indent"] + "    ")
        return f"{found['indent']}Example:\n{indented}\n\n"

    return EXAMPLE.sub(fenced, text + "\n").rstrip("\n")


def link_examples(text: str) -> str:
    """The docstring with a link in place of each name of archipel in `Example: see`."""

    def linked(found: re.Match[str]) -> str:
        return re.sub(r"`(archipel[\w.]*)`", r"[`\1`][\1]", found[0])

    return POINTER.sub(linked, text)
