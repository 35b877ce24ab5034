"""Every code block of docs/quickstart.md and docs/by-hand.md runs: federations in three commands, and step by step."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.running_pages import run_page


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("rounds", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_quickstart(rounds: int, tmp_path: Path, shell: dict[str, str]) -> None:
    """As it is written in the long suite; in the short one its two federations have fewer rounds."""
    started = time.monotonic()
    printed = run_page("docs/quickstart.md", tmp_path, shell, rounds)
    assert printed.count(f"round {rounds} of {rounds}: 8 devices") == 2
    # Predictions of the bundle with what was learned, of the exported file, and of its int8 form.
    of_bundle, of_file, _ = re.findall(r"float32\[5, 3\].*", printed)
    assert of_bundle == of_file
    for made in ("shapes/federation", "mine"):
        assert (tmp_path / made / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "trained.onnx").is_file()
    assert time.monotonic() - started < 600


@pytest.mark.slow
def test_by_hand(tmp_path: Path, shell: dict[str, str]) -> None:
    assert "completed 2 rounds" in run_page("docs/by-hand.md", tmp_path, shell)
