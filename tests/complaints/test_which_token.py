"""'401, and I have five tokens.'"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.federation.test_remote import served  # noqa: F401  (a fixture)
from tests.support.commands import Command


@pytest.mark.sampled(every=3)
def test_a_refused_token_is_named_with_its_file_and_the_server(archipel: Command, served: Path) -> None:  # noqa: F811
    (served / "old.token").write_text("apt_" + "x" * 43 + "\n")
    said = archipel("task", "list", "--token-file", str(served / "old.token"), code=1)[1]
    server = os.environ["ARCHIPEL_SERVER"]
    assert said.startswith(f"archipel: {served / 'old.token'}: {server} does not take this token: the token is unknown")
    assert "x" * 43 not in said


@pytest.mark.sampled(every=3)
def test_of_the_environment_the_variable_is_named(
    archipel: Command, served: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setenv("ARCHIPEL_TOKEN", "apt_" + "y" * 43)
    assert archipel("task", "list", code=1)[1].startswith("archipel: ARCHIPEL_TOKEN: http://127.0.0.1:")
