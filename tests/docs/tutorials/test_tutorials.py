"""Every block of every tutorial runs, in an empty folder, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT
from tests.support.running_pages import run_page

FOLDER = "docs/tutorials"


def test_each_tutorial_is_run() -> None:
    here = {"pytorch-on-devices", "compress-under-a-budget", "simulate-then-deploy", "federate-with-privacy"}
    here |= {"roll-out-and-back"}
    elsewhere = {"browser-joins", "production-with-an-edge"}
    assert {path.stem for path in (ROOT / FOLDER).glob("*.md")} == here | elsewhere


@pytest.mark.sampled(every=14)
def test_pytorch_on_devices(tmp_path: Path, shell: dict[str, str]) -> None:
    printed = run_page(f"{FOLDER}/pytorch-on-devices.md", tmp_path, shell)
    first, last = map(float, re.findall(r"right: ([\d.]+) -> ([\d.]+)", printed)[0])
    assert last > first + 0.2
    (right,) = re.findall(r"(\d+)% right on people", printed)
    assert int(right) > 60  # of four classes


@pytest.mark.sampled(every=14)
def test_compress_under_a_budget(tmp_path: Path, shell: dict[str, str]) -> None:
    printed = run_page(f"{FOLDER}/compress-under-a-budget.md", tmp_path, shell)
    assert "meets size<40%, accuracy>=-2" in printed
    assert (tmp_path / "small.onnx").stat().st_size < 0.4 * (tmp_path / "model.onnx").stat().st_size
    assert "<svg" in (tmp_path / "search.html").read_text()


@pytest.mark.sampled(every=14)
def test_simulate_then_deploy(tmp_path: Path, shell: dict[str, str]) -> None:
    printed = run_page(f"{FOLDER}/simulate-then-deploy.md", tmp_path, shell)
    for accuracy in re.findall(r"^test: accuracy ([\d.]+)", printed, re.M):
        assert float(accuracy) > 0.7
    assert "completed" in printed
    assert (tmp_path / "weights.safetensors").is_file()


@pytest.mark.sampled(every=14)
def test_federate_with_privacy(tmp_path: Path, shell: dict[str, str]) -> None:
    printed = run_page(f"{FOLDER}/federate-with-privacy.md", tmp_path, shell)
    multipliers = [float(each) for each in re.findall(r"noise of ([\d.]+) clips", printed)]
    assert multipliers == sorted(multipliers, reverse=True)
    assert len(multipliers) == 3


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("name", ["from-flower", "from-mindspore"])
def test_pages_for_those_who_come_from_elsewhere(name: str, tmp_path: Path, shell: dict[str, str]) -> None:
    printed = run_page(f"docs/migration/{name}.md", tmp_path, shell)
    (accuracy,) = re.findall(r"^test: accuracy ([\d.]+)", printed, re.M)
    assert float(accuracy) > 0.5
    assert (tmp_path / "curves.png").is_file()


@pytest.mark.sampled(every=14)
def test_roll_out_and_back(tmp_path: Path, shell: dict[str, str]) -> None:
    printed = run_page(f"{FOLDER}/roll-out-and-back.md", tmp_path, shell)
    history = re.findall(r"^\d +(\d) +(rollback|rollout|promote) +(admin|coordinator)", printed, re.M)
    assert history == [("1", "rollback", "admin"), ("2", "rollout", "coordinator"), ("1", "promote", "admin")]


@pytest.mark.slow
def test_production_with_an_edge(tmp_path: Path, shell: dict[str, str]) -> None:
    printed = run_page(f"{FOLDER}/production-with-an-edge.md", tmp_path, shell)
    assert "completed: 1 of 1 rounds" in printed
    assert re.search(r"  committed +2 +2 ", printed)  # the two edges
    assert (tmp_path / "restored" / "server.toml").is_file()
