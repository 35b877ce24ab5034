"""Environments of packages that must not be installed beside archipel, for tests of `make test-all`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def other_python(name: str, *packages: str, beside: bool = False) -> Path:
    """The Python of the environment .cache/environments/`name`, which is made if it is not there.

    `beside`: it sees the packages of this environment too. Where it cannot be made the test is skipped, in CI it fails.
    """
    script, folder = ROOT / "scripts" / "environment.py", ROOT / ".cache" / "environments" / name
    command = [sys.executable, str(script), str(folder), *(["--beside"] if beside else []), "--", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{done.stderr.strip()} (it is needed in CI)")
        pytest.skip(done.stderr.strip())
    return Path(done.stdout.strip())
