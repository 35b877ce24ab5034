"""Where a result comes from: the day, the commit and whether files differed from it, the processor, the libraries."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beside import ROOT

LIBRARIES = ("archipel", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "torch", "numpy", "scipy")
Stamp = dict[str, Any]
"""JSON-able: `date` (UTC, ISO), `commit`, `clean` (nothing differs from the commit), `processor`, `versions`."""


@lru_cache(maxsize=1)
def stamp(root: Path = ROOT) -> Stamp:
    """Of this process, taken once: what was loaded at its start is what it runs."""
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or "unknown",
        "clean": bool(commit) and _git(root, "status", "--porcelain") == "",
        "processor": processor(),
        "versions": {"Python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
    }


def described(stamps: Iterable[Stamp]) -> str:
    """One sentence of all of them: days, commits, processors; a commit whose files had changed is said to have."""
    found = list(stamps)
    if not found:
        return "not run."
    days = sorted({each["date"] for each in found})
    commits = sorted({f"{each['commit']}{'' if each['clean'] else ' **with uncommitted changes**'}" for each in found})
    processors = sorted({each["processor"] for each in found})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{when}, commit {', '.join(commits)}, on {', '.join(processors)}."


def versions(stamps: Iterable[Stamp]) -> str:
    """Every library with its version, or its versions where results were made with several."""
    found: dict[str, set[str]] = {}
    for each in stamps:
        for name, number in each["versions"].items():
            found.setdefault(name, set()).add(number)
    return ", ".join(f"{name} {' and '.join(sorted(numbers))}" for name, numbers in found.items())


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


def _git(root: Path, *arguments: str) -> str | None:
    """What git answers, None where it fails or is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
