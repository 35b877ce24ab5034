"""The code blocks of the README and of docs/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)?( background)?(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[str, bool, str]]:
    """Language, whether it goes on in the background, and text of each block."""
    return [
        (language, bool(background), text) for language, background, _, text in BLOCK.findall((ROOT / page).read_text())
    ]


def titles(page: str) -> list[str]:
    """For each block the name of the file that it is, empty for one that is none."""
    return [title for _, _, title, _ in BLOCK.findall((ROOT / page).read_text())]
