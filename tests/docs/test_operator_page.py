"""docs/operator-api.md: its code runs against a server, and its table has every method."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.operator.test_routes import documentation
from tests.support.fixtures.served import *  # noqa: F403
from tests.support.operator_calls import methods
from tests.support.pages import ROOT, blocks
from tests.support.served import Served

PAGE = "docs/operator-api.md"


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


def test_the_table_has_every_method() -> None:
    table = re.findall(r"^\| `(\w+\.\w+)` \| .+ \| (?:`(.+)`|calls `\w+\.(\w+)`) \|$", (ROOT / PAGE).read_text(), re.M)
    assert sorted(name for name, _, _ in table) == sorted(methods())
    for name, route, other in table:
        assert f"\nRoute: {route}\n" in documentation(name) or f"\nCalls: {other}\n" in documentation(name), name
