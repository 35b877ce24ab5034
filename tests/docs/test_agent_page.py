"""The code of docs/agent.md and docs/device-command.md runs, with a server; the settings on them are the agent's."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import fields
from sqlalchemy import select

from archipel.client import AgentConfig
from archipel.client.settings import load_device_settings
from archipel.protocol.sealed import encode
from archipel.server.database.tables import CheckInRow
from tests.support.federation import Federation
from tests.support.fixtures.federation import *  # noqa: F403
from tests.support.pages import ROOT, blocks
from tests.support.registry import FIRST, Registry


@pytest.mark.sampled(every=8)
def test_the_page_runs(federation: Federation, tmp_path: Path, shell: dict[str, str]) -> None:
    (tmp_path / "device.token").write_bytes(encode(federation.token()))
    federation.task(eligibility='app == "2.2" and ram >= 1GiB and charging', min_cohort=3, cohort=3)
    Registry(federation, {}).add(FIRST, model="readings")
    code = "\n".join(text for language, _, text in blocks("docs/agent.md") if language == "python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"enrolled  \{'population': 'pupils'\}\nwaiting  .*\nwaiting \n", done.stdout)
    assert "\nadopted  {'model': 'readings', 'version': 1," in done.stdout
    assert "{'readings': 1}\n[0.6" in done.stdout
    [task] = federation.operator.tasks.list()
    # Whether the device still counts as waiting depends on how long the page's last part took.
    assert task.waiting_for.endswith("waiting; 3 needed, 1 enrolled in population 'pupils'")
    with federation.server._services.database.read() as session:
        [told] = session.scalars(select(CheckInRow.attributes))
    assert told == {"app": "2.2", "ram": 4 * 2**30, "charging": True}


@pytest.mark.sampled(every=8)
def test_the_commands_run(federation: Federation, tmp_path: Path, shell: dict[str, str]) -> None:
    (tmp_path / "my.token").write_bytes(encode(federation.token()))
    np.savez(tmp_path / "data.npz", **federation.data(0))
    code = "\n".join(text for language, _, text in blocks("docs/device-command.md") if language == "sh")
    done = subprocess.run(
        ["bash", "-e", "-c", code], cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "done        outcome waiting\n" in done.stdout
    assert "population  pupils\n" in done.stdout


def test_a_device_s_settings(tmp_path: Path) -> None:
    text, of_site, with_gpu = [text for language, _, text in blocks("docs/device-command.md") if language == "toml"]
    (tmp_path / "gpu.toml").write_text(with_gpu)
    assert load_device_settings(tmp_path / "gpu.toml", environment={}).config.delegates == ["torch"]
    (tmp_path / "site.toml").write_text(of_site)
    site = load_device_settings(tmp_path / "site.toml", environment={}).examples
    assert site is not None
    assert (site.fields["features"], site.classes["outcome"][2]) == (["age", "pulse"], "icu")
    (tmp_path / "device.toml").write_text(text)
    found = load_device_settings(tmp_path / "device.toml", environment={})
    assert found.report == ("charging", "battery")
    assert found.config.attributes == {"site": "north", "cameras": 2}


def test_settings_are_those_of_the_agent() -> None:
    defaults = {each.name: each.default for each in fields(AgentConfig)}
    words: dict[str, object] = {
        "`False`": False, "`True`": True, "`True` on Linux": True, "any number": None, "any": None,
        "all three": ("training", "evaluation", "analytics"), "the pinned ones": (), "the token's": (),
        '`"onnxruntime"`': "onnxruntime", "nowhere": "",
    }  # fmt: skip
    table = re.findall(r"^\| `([a-z]\w+)` \| (.+?) \|", (ROOT / "docs" / "agent.md").read_text(), re.M)
    for name, default in table:
        size = re.fullmatch(r"(\d+) Mi(B|)", default)
        told = int(size[1]) << 20 if size else words.get(default, "nothing")
        if re.fullmatch(r"[0-9.]+", default):
            told = float(default)
        assert name == "attributes" or told == defaults[name], name
    assert {"attributes", "allow_plain", "max_peak_bytes"} <= {name for name, _ in table}


def test_every_setting_has_its_explanation_beside_it() -> None:
    [body] = [each.body for each in ast.parse(inspect.getsource(AgentConfig)).body if isinstance(each, ast.ClassDef)]
    explained = {
        setting.target.id
        for setting, text in pairwise(body)
        if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }  # fmt: skip
    assert explained == {each.name for each in fields(AgentConfig)}
