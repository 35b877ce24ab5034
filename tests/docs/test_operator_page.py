"""The operator's Python API: the README's block runs rounds with real devices; the code of docs/operator-api.md runs
against a server, and its table has every method."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

from archipel.bundle import PrivacyPolicy, pack
from archipel.converter import Signing, Training, convert
from archipel.training import losses, optimizers
from tests.operator.test_routes import documentation
from tests.support.federation import Federation
from tests.support.fixtures.federation import federation, server_host  # noqa: F401
from tests.support.fixtures.served import *  # noqa: F403
from tests.support.operator_calls import methods
from tests.support.pages import ROOT, blocks
from tests.support.served import Served

PAGE = "docs/operator-api.md"


@pytest.mark.sampled(every=3)
def test_the_page_runs(served: Served, shell: dict[str, str]) -> None:
    (served.folder / "operator.token").write_text(f"{served.token}\n")
    code = "\n".join(text for language, _, text in blocks(PAGE) if language == "python")
    assert code.count('"http://127.0.0.1:8470"') == 1
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code.replace("http://127.0.0.1:8470", served.url)],
        cwd=served.folder, env=shell, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok ")
    assert lines[1].startswith("digits running 0 of 10 ")
    assert lines[2:5] == ["cancelled 0", "soaking stage 1 of 2", "[(2, 'rejected'), (1, 'promoted')]"]
    actions = ["bundle.publish", "task.cancel", "model.promote", "rollout.create", "token.create"]
    assert all(f"'{action}'" in lines[5] for action in actions)
    assert int(lines[6]) == lines[5].count(",") + 1
    assert lines[7:] == [f"404 not_found no task {'0' * 32}"]


@pytest.mark.sampled(every=3)
def test_the_block_of_the_readme_runs_rounds(federation: Federation, shell: dict[str, str]) -> None:  # noqa: F811
    [code] = [text for language, _, text in blocks("README.md") if language == "python" and "OperatorClient(" in text]
    for written, here in {
        '"http://127.0.0.1:8470"': f'"{federation.url}"',
        "min_cohort=15, cohort=16": "min_cohort=3, cohort=3",  # the page's are for the default policy
        "rounds=5": "rounds=2",
    }.items():
        assert code.count(written) == 1
        code = code.replace(written, here)
    folder = federation.folder
    (folder / "operator.token").write_text(f"{federation.operator_token}\n")
    torch.manual_seed(0)
    convert(
        nn.Linear(4, 3), folder / "digits", example=torch.zeros(2, 4),
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.1), batch_size=8),
        privacy=PrivacyPolicy(
            modes=("secure",), min_cohort=3, threshold=0.6, max_clip=10.0, max_bits=20, colluders=0.0
        ),
        signing=Signing(federation.publisher_key),
    )  # fmt: skip
    pack(folder / "digits", folder / "digits.bundle")
    rng = np.random.default_rng(0)
    data = {"input": rng.standard_normal((16, 4), np.float32), "label": rng.integers(0, 3, 16)}
    agents = [federation.agent(number, examples=lambda: data) for number in range(3)]
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", code]
    with subprocess.Popen(
        command, cwd=folder, env=shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as operator:
        federation.run(agents, lambda: operator.poll() is not None)
        printed, errors = operator.communicate()
    assert operator.returncode == 0, errors
    lines = printed.splitlines()
    assert lines[0].startswith("0 of 2 rounds")
    assert lines[-1] == "completed {'bias': (3,), 'weight': (3, 4)}"
    assert "training loss" in (folder / "curves.svg").read_text()
    assert ElementTree.parse(folder / "curves.svg").getroot().tag.endswith("svg")
    [task] = federation.operator.tasks.list()
    assert (folder / "digits.safetensors").read_bytes() == federation.operator.weights.download(str(task.model))


def test_the_table_has_every_method() -> None:
    table = re.findall(r"^\| `(\w+\.\w+)` \| .+ \| (?:`(.+)`|calls `\w+\.(\w+)`) \|$", (ROOT / PAGE).read_text(), re.M)
    assert sorted(name for name, _, _ in table) == sorted(methods())
    for name, route, other in table:
        assert f"\nRoute: {route}\n" in documentation(name) or f"\nCalls: {other}\n" in documentation(name), name
