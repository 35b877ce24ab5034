"""The code blocks of the README and of docs/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)?( background)?\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[str, bool, str]]:
    """Language, whether it goes on in the background, and text of each block."""
    return [
        (language, bool(background), text) for language, background, text in BLOCK.findall((ROOT / page).read_text())
    ]
