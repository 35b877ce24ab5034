"""Every code block of the README and of docs/ runs, in order, as one story for each page."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from archipel import strategies
from archipel.bundle import PrivacyPolicy, parse_card
from archipel.cli.models.convert.analysis_options import AnalysisOptions
from archipel.cli.models.train.job import read_job
from archipel.compression.recipe import parse_recipe
from archipel.operator import TaskRequest
from archipel.preprocessing import from_settings
from archipel.protocol.operator.registry import RolloutRequest
from archipel.server.openid_settings import OpenId
from archipel.server.registry.gates import check_gate
from archipel.simulation import load_federation
from archipel.strategies.device import describe
from archipel.training.cloud.config import parse_config
from tests.support.pages import ROOT, blocks

RUNNABLE = {"python", "sh"}
TUTORIALS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/tutorials/*.md"))
"""Those whose every block tests/docs/tutorials runs."""
MIGRATIONS = ["docs/migration/from-flower.md", "docs/migration/from-mindspore.md"]
"""The same."""
RUN = {
    "README.md",
    "docs/agent.md",
    "docs/by-hand.md",
    "docs/cloud.md",
    "docs/compression.md",
    "docs/data.md",
    "docs/device-command.md",
    "docs/device.md",
    "docs/importing.md",
    "docs/insight.md",
    "docs/models.md",
    "docs/operator-api.md",
    "docs/parallel.md",
    "docs/preprocessing.md",
    "docs/privacy.md",
    "docs/python_functions.md",
    "docs/queries.md",
    "docs/quickstart.md",
    "docs/robust.md",
    "docs/simulation.md",
    "docs/store.md",
    "docs/strategies.md",
    "docs/training.md",
    "docs/transformations.md",
    *TUTORIALS,
    *MIGRATIONS,
}
PREPROCESSING = "docs/preprocessing.md"
EDGES = "docs/edge.md"
"""The page whose TOML is of a policy."""
TASKS = ("docs/tasks.md", "docs/queries.md", "docs/rollouts.md")
"""The pages whose TOML is of tasks, rollouts and analyses; elsewhere it is of recipes."""
LOGINS = "docs/dashboard.md"
CARDS = "docs/models.md"
"""The page whose TOML is of model cards."""
FEDERATIONS = "docs/simulation.md"
NOISE = "docs/privacy.md"
UPDATES = "docs/update-compression.md"
"""The page whose TOML is of federations."""
TRAININGS = "docs/cloud.md"
"""The page whose TOML is for `archipel train`."""
SHOWN = {"text", "mermaid", "json", "ts", "kotlin", "swift", "toml"}
"""Drawings, the manifests that test_design.py validates, other languages, recipes and tasks."""


def pages() -> list[str]:
    return ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def test_every_block_says_what_it_is() -> None:
    """And code is only on the pages that are run below."""
    for page in pages():
        for language, _, text in blocks(page):
            assert language in RUNNABLE | SHOWN, (page, text)
            assert language in SHOWN or page in RUN, (page, text)


def test_recipes_and_tasks_decode(tmp_path: Path) -> None:
    found = [
        (page, text)
        for page in pages()
        for language, _, text in blocks(page)
        if language == "toml"
        and page not in ("docs/device-command.md", *TUTORIALS, *MIGRATIONS)  # settings of a device: test_agent_page.py
    ]
    assert len(found) > 3
    for page, text in found:
        if page in TASKS:
            values = tomllib.loads(text)
            if "statistic" in values:
                (tmp_path / "analysis.toml").write_text(text)
                assert AnalysisOptions(tmp_path / "analysis.toml").read()
            elif "stages" in values:
                gate = msgspec.convert(values, RolloutRequest).gate
                assert not isinstance(gate, str)
                check_gate(gate)
            else:
                msgspec.convert({**values, "bundle": "0" * 64}, TaskRequest)
        elif page == LOGINS:
            assert msgspec.convert(tomllib.loads(text)["openid"], OpenId).role_of(["ml-team"]) == "operator"
        elif page == CARDS:
            assert parse_card(text)
        elif page == TRAININGS:
            (tmp_path / "job.toml").write_text(text)
            assert parse_config(read_job(tmp_path / "job.toml", []).train).epochs
        elif page == FEDERATIONS:
            (tmp_path / "federation.toml").write_text(text)
            assert load_federation(tmp_path / "federation.toml").settings.rounds
        elif page == NOISE:
            (tmp_path / "federation.toml").write_text(text + '[model]\nzoo = "mlp"\n[data]\ntrain = "x.npz"\n')
            assert load_federation(tmp_path / "federation.toml").settings.differential_privacy.mechanism in text
        elif page == UPDATES:
            options = tomllib.loads(text)["strategy"]
            strategy = strategies.get(options.pop("name"))
            assert describe(strategy.name, strategy.device, options).parts
        elif page == EDGES:
            values = tomllib.loads(text)
            if "levels" in values:
                assert msgspec.convert({**values, "bundle": "0" * 64}, TaskRequest).levels
                continue
            assert msgspec.convert({"modes": ["secure"], "threshold": 0.6, "max_clip": 1.0, "max_bits": 20, **values},
                                   PrivacyPolicy).aggregators  # fmt: skip
        elif page == PREPROCESSING:
            assert from_settings(tomllib.loads(text)["preprocess"])
        else:
            assert parse_recipe(text), page


def run_page(page: str, folder: Path, shell: dict[str, str]) -> list[str]:
    """Run the Python blocks of a page as one program, then its commands as one script; what each of them prints."""
    code = "\n".join(text for language, _, text in blocks(page) if language == "python")
    commands = "\n".join(text for language, _, text in blocks(page) if language == "sh")
    outputs = []
    for command in (
        [sys.executable, "-W", "error::DeprecationWarning:archipel", "-c", code],
        ["bash", "-e", "-c", commands],
    ):
        done = subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    return outputs


def test_readme(tmp_path: Path, shell: dict[str, str]) -> None:
    code = "\n".join(
        text for language, _, text in blocks("README.md") if language == "python" and "OperatorClient(" not in text
    )  # test_operator_page.py runs the block that needs a server
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:archipel", "-c", code],
        cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.match(r"(\S+) -> (\S+)", done.stdout).groups())  # type: ignore[union-attr]
    assert last < first
    assert (tmp_path / "digits.bundle").is_file()


@pytest.mark.slow
def test_training(tmp_path: Path, shell: dict[str, str]) -> None:
    code = "\n".join(text for _, _, text in blocks("docs/training.md"))
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:archipel", "-c", code],
        cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    falls = re.findall(r"([\d.]+) -> ([\d.]+)", done.stdout)
    assert len(falls) == 2
    assert all(float(last) < 0.8 * float(first) for first, last in falls)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "page",
    [
        "docs/store.md",
        "docs/transformations.md",
        *(
            pytest.param(page, marks=pytest.mark.slow)
            for page in (
                "docs/python_functions.md",
                "docs/importing.md",
                "docs/insight.md",
                CARDS,
                PREPROCESSING,
                "docs/robust.md",
                "docs/strategies.md",
                *(page for page in TASKS if any(language == "python" for language, *_ in blocks(page))),
            )
        ),
    ],
)
def test_python_blocks(page: str, tmp_path: Path, shell: dict[str, str]) -> None:
    code = "\n".join(text for language, _, text in blocks(page) if language == "python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_simulation(tmp_path: Path, shell: dict[str, str]) -> None:
    """Model and data, and the file, as the page has them; then the rest of its code and the commands."""
    found = blocks(FEDERATIONS)
    (tmp_path / "mine.py").write_text(next(text for language, _, text in found if language == "python"))
    (tmp_path / "federation.toml").write_text(next(text for language, _, text in found if language == "toml"))
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 900)
    x = (rng.normal(0, 1, (3, 12))[y] + rng.normal(0, 1, (900, 12))).astype(np.float32)
    np.savez(tmp_path / "people.npz", x=x, y=y, person=rng.integers(0, 20, 900))
    outputs = run_page(FEDERATIONS, tmp_path, shell)
    accuracy, *_ = re.findall(r" (0\.\d+)$", outputs[0], re.M)
    assert float(accuracy) > 0.7
    for accuracy in re.findall(r"^test: accuracy ([\d.]+)", outputs[1], re.M):
        assert float(accuracy) > 0.7
    assert '"tested"' in (tmp_path / "fedprox.json").read_text()
    assert (tmp_path / "curves.png").is_file()
    assert (tmp_path / "scaffold" / "history.json").is_file()


@pytest.mark.slow
def test_cloud(tmp_path: Path, shell: dict[str, str]) -> None:
    """The Python blocks, which make the files, then the commands."""
    run_page(TRAININGS, tmp_path, shell)
    assert (tmp_path / "trained" / "curves.png").is_file()


@pytest.mark.slow
def test_parallel(tmp_path: Path, shell: dict[str, str]) -> None:
    """The Python block, which makes the files, then the commands; both tell a plan."""
    for output in run_page("docs/parallel.md", tmp_path, shell):
        assert "8 devices, batches of 4096" in output


@pytest.mark.slow
def test_device(tmp_path: Path, shell: dict[str, str]) -> None:
    """Publisher and device in Python, then the commands on what they made."""
    outputs = run_page("docs/device.md", tmp_path, shell)
    first, last = map(float, re.match(r"(\S+) -> (\S+)", outputs[0]).groups())  # type: ignore[union-attr]
    assert last < first
    assert "nodes on cpu" in outputs[0]
    assert "6 steps on 96 examples" in outputs[1]
    assert "cold start" in outputs[1]


@pytest.mark.slow
def test_data(tmp_path: Path, shell: dict[str, str]) -> None:
    """Python first: it makes the files that the commands take."""
    outputs = run_page("docs/data.md", tmp_path, shell)
    # What the comments on the page say is printed.
    assert "people.csv, line 5: '4O' in column 'hours' is no number; correct the file" in outputs[0]
    assert "2 left out: people.csv, line 3: no value in column 'job'; people.csv, line 5: '4O' in" in outputs[0]
    assert "the arrays, row 17: field 'input' is nan; correct it or leave the example out" in outputs[0]
    assert '"left_out": 2' in outputs[1]


@pytest.mark.slow
def test_compression(tmp_path: Path, shell: dict[str, str]) -> None:
    """Python first: it makes the files that the commands take."""
    outputs = run_page("docs/compression.md", tmp_path, shell)
    smaller, full = map(int, re.findall(r"^(\d+) of (\d+) bytes$", outputs[0], re.M)[0])
    assert smaller < 0.5 * full
    assert "meets size<40%, accuracy>=-2" in outputs[0]
    assert "meets size<40%, accuracy>=-2" in outputs[1]
    accuracies = list(map(float, re.findall(r"^accuracy +([\d.]+)\ncount +\d+$", outputs[1], re.M)))
    assert accuracies
    assert all(0.7 < accuracy <= 1 for accuracy in accuracies)
    for name in ("report.html", "search.html"):
        assert "<svg" in (tmp_path / name).read_text()
