"""Where figures come from: the day, the commit and whether files differed from it, the processor, the libraries."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("archipel", "onnxruntime", "torch", "numpy", "cryptography", "flask")


class Origin(msgspec.Struct):
    """`date`: UTC, ISO. `clean`: no file differs from the `commit`. `versions` by library, with Python's."""

    date: str
    commit: str
    clean: bool
    processor: str
    versions: dict[str, str]

    def __str__(self) -> str:
        changes = "" if self.clean else " **with uncommitted changes**"
        libraries = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.date}, commit {self.commit}{changes}, on {self.processor}; {libraries}."


def origin() -> Origin:
    """Of this process."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    versions = {"Python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    clean = bool(commit) and _git("status", "--porcelain") == ""
    return Origin(today, commit or "unknown", clean, _processor(), versions)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    """What git answers, None where it fails or is missing."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
