"""`archipel demo --model --data`: the demo's rounds and report on one's own model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from archipel.cli.start.demo.own import OwnResults, write_own_report
from archipel.cli.start.demo.results import DeviceRow, RoundRow
from tests.support.commands import Command

NET = """<ir_version: 10, opset_import: ["": 21]>
net (float[n, 4] features) => (float[n, 3] logits) <float[4, 3] w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}> {
    logits = MatMul(features, w)
}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(NET), tmp_path / "mine.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 4)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=(x @ rng.standard_normal((4, 3))).argmax(axis=1))
    return tmp_path


@pytest.mark.slow
def test_the_report_shows_the_gain_and_the_curves(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "archipel", "demo", "--model", "mine.onnx", "--data", "mine.npz",
         "--devices", "6", "--rounds", "3"],
        cwd=folder, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "60 held-out examples" in done.stdout
    assert list(folder.glob("archipel-demo-*")) == []
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "240 examples that never left them" in page
    assert "training loss" in page
    assert "in 3 rounds of" in page
    row = page[page.index("<tr><td>accuracy</td>") :].split("</tr>")[0]
    before, after = (float(cell.partition("<")[0]) for cell in row.split('<td class="n">')[1:])
    assert before < 0.5 < after
    # Two of six vanish in every round; those that did are named.
    for part in page.split("<td>committed</td>")[1:]:
        assert len(part.split("</tr>")[0].rpartition("<td>")[2].partition("<")[0].split(", ")) == 2


@pytest.mark.sampled(every=3)
def test_names_are_text_in_the_page(tmp_path: Path) -> None:
    fleet = [DeviceRow("<b>", 30, 1500, 2500, ("unmasking",)), DeviceRow("c", 30, 500, 500, ("masking",))]
    rounds = [RoundRow(1, "failed", 2.0, None, ("c",), ("<b>",), "<i>")]
    gains = {"<u>": (0.5, 0.75)}
    write_own_report(
        OwnResults("<s>", 2, 60, 15, gains, rounds, {"training loss": [(1, 0.5)]}, fleet), tmp_path / "page"
    )
    page = (tmp_path / "page").read_text()
    assert {f"<{letter}>" for letter in "bius"}.isdisjoint(re.findall("<.>", page))
    assert "What the devices taught &lt;s&gt;" in page
    assert "<td>failed: &lt;i&gt;</td>" in page
    assert "on average 1.0 kB sent and\n1.5 kB received" in page


def test_what_is_missing_is_told(folder: Path, archipel: Command) -> None:
    model, data = str(folder / "mine.onnx"), str(folder / "mine.npz")
    for arguments, words in (
        (["--model", model], "--model and --data: give both"),
        (["--model", model, "--data", "no.npz", "--devices", "8"], "no.npz: no such file"),
        (["--model", model, "--data", data, "--devices", "5"], "--devices: expected at least 6"),
    ):
        _, err = archipel("demo", *arguments, code=1)
        assert words in err
