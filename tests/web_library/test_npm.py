"""The browser library's own tests, in TypeScript under Node, and whether their vectors are still Python's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"


def run(*command: str, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=WEB, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture
def npm() -> str:
    npm = shutil.which("npm")
    if npm is None or not (WEB / "node_modules" / "vitest").is_dir():
        reason = "needs Node.js 20 and web/node_modules; `make web` sets them up"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return npm


def test_its_types(npm: str) -> None:
    run(npm, "run", "--silent", "check", NO_COLOR="1")


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("shard", range(1, 9))
def test_its_own_tests(npm: str, shard: int) -> None:
    """One eighth of the files after the other."""
    run(npm, "exec", "vitest", "--", "run", f"--shard={shard}/8", NO_COLOR="1")


@pytest.mark.slow
def test_a_reload_after_each_write_and_request(npm: str) -> None:
    """Of a device in a round, where the suite above takes some of them."""
    files = [f"tests/device_{name}.test.ts" for name in ("reload", "neighbour_reload", "versions")]
    run(npm, "exec", "vitest", "--", "run", *files, NO_COLOR="1", ALL_POINTS="1")


def test_the_vectors_are_what_python_draws(tmp_path: Path) -> None:
    kept = WEB / "tests" / "vectors"
    run(sys.executable, "tests/make_vectors.py", str(tmp_path))
    names = sorted(path.name for path in kept.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    # Digests, because pytest would spend half an hour on the differences of two such lines.
    ours, drawn = ([sha256((place / name).read_bytes()).hexdigest() for name in names] for place in (kept, tmp_path))
    assert ours == drawn, "run web/tests/make_vectors.py"
