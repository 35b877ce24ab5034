"""A server over TCP without a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Served:
    """`url` of a server, and the `token` of its admin; `folder` holds digits.bundle and newer.bundle."""

    url: str
    token: str
    folder: Path
