"""`archipel model` and `archipel rollout`, against a server over TCP."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archipel import bundle as b
from archipel.operator import OperatorClient
from archipel.server import load_settings
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from tests.cli.federation.test_remote import served  # noqa: F401  (a fixture)
from tests.support.tiny_bundle import make_bundle

Command = Callable[..., tuple[str, str]]

ROLLOUT = """model = "digits"
version = 2
stages = [{percent = 5, soak_seconds = 3600}, {percent = 50, soak_seconds = 60}]
[gate]
metric = "accuracy"
range = 1.0
better = "higher"
max_loss = 0.01
min_devices = 10
max_devices = 20
"""


@pytest.fixture
def digits(archipel: Command, served: Path) -> Path:  # noqa: F811
    """Model digits with two versions, the first of them promoted."""
    key = b.load_private_key(served / "publisher.key")
    archipel("model", "create", "digits", "--population", "pupils")
    for name in ("tiny", "tiny2"):
        file = make_bundle(served, key, name=name) if name == "tiny2" else served / "tiny.bundle"
        archipel("model", "register", "digits", "--bundle", str(file))
    archipel("model", "promote", "digits", "1")
    (served / "rollout.toml").write_text(ROLLOUT)
    return served


def fields(out: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in out.partition("\n\n")[0].splitlines())


@pytest.mark.sampled(every=3)
def test_models_and_versions(archipel: Command, digits: Path) -> None:
    head, row = archipel("model", "list")[0].splitlines()
    assert head.split() == ["model", "population", "promoted", "newest", "rollout"]
    assert row.split() == ["digits", "pupils", "1", "2", "-"]
    assert fields(archipel("model", "show", "digits")[0])["promoted"] == "1"
    head, second, first = archipel("model", "versions", "digits")[0].splitlines()
    assert head.split()[:3] == ["version", "state", "digest"]
    assert (second.split()[:2], first.split()[:2]) == (["2", "registered"], ["1", "promoted"])
    assert head.split()[-3:] == ["expires", "weights", "reason"]
    assert second.split()[-1] == "there"
    shown = json.loads(archipel("model", "version", "digits", "2", "--json")[0])
    assert shown["evaluations"] == []
    assert fields(archipel("model", "version", "digits", "2")[0])["digest"] == shown["digest"]
    # A digest instead of a file, and the same content is the same version.
    again = json.loads(archipel("model", "register", "digits", "--bundle", shown["bundle"], "--json")[0])
    assert again["number"] == 2
    assert "either --bundle or --task" in archipel("model", "register", "digits", code=1)[1]
    assert "no task" in archipel("model", "register", "digits", "--task", "0" * 32, code=1)[1]


@pytest.mark.sampled(every=3)
def test_a_bundle_that_expires(archipel: Command, served: Path) -> None:  # noqa: F811
    key, end = b.load_private_key(served / "publisher.key"), 4_102_444_800  # the year 2100 begins
    archipel("model", "create", "digits", "--population", "pupils")
    file = make_bundle(served, key, name="ends", not_after=end)
    made = archipel("model", "register", "digits", "--bundle", str(file))[0]
    assert fields(made)["not_after"] == "2100-01-01 00:00:00Z"
    assert archipel("model", "versions", "digits")[0].splitlines()[1].endswith("  2100-01-01 00:00:00Z  there")
    over = make_bundle(served, key, name="over", not_after=1)
    said = archipel("model", "register", "digits", "--bundle", str(over), code=1)[1]
    assert "it expired at 1970-01-01 00:00:01Z, here it is 20" in said
    # What was promoted and expired since.
    archipel("model", "promote", "digits", "1")
    with sqlite3.connect(served / "server" / "archipel.db") as database:
        found = database.execute("SELECT manifest FROM bundles WHERE name = 'ends'").fetchone()[0]
        changed = found.replace(f'"not_after":{end}'.encode(), b'"not_after":1')
        assert changed != found
        database.execute("UPDATE bundles SET manifest = ? WHERE name = 'ends'", (changed,))
    said = "the bundle of version 1 expired at 1970-01-01 00:00:01Z: it is offered to no device"
    for command in (("show", "digits"), ("list",), ("promote", "digits", "1")):
        assert said in archipel("model", *command)[0]
    assert "expired 1970-01-01 00:00:01Z" in archipel("model", "versions", "digits")[0]


@pytest.mark.sampled(every=3)
def test_promote_and_one_command_to_go_back(archipel: Command, digits: Path) -> None:
    assert archipel("model", "promote", "digits", "2")[0] == "model digits: version 2 is promoted\n"
    assert archipel("model", "rollback", "digits")[0] == "model digits: version 1 is promoted\n"
    assert "no version" in archipel("model", "rollback", "digits", code=1)[1]
    _, *rows = archipel("model", "history", "digits")[0].splitlines()
    assert [row.split()[:3] for row in rows] == [["3", "1", "rollback"], ["2", "2", "promote"], ["1", "1", "promote"]]
    assert archipel("model", "reject", "digits", "2", "--reason", "slow")[0] == "rejected\n"
    assert "is rejected: slow" in archipel("model", "promote", "digits", "2", code=1)[1]
    assert archipel("model", "restore", "digits", "2")[0] == "registered\n"


@pytest.mark.sampled(every=3)
def test_a_rollout_from_file_to_aborted(archipel: Command, digits: Path) -> None:
    call = ("rollout", "create", str(digits / "rollout.toml"), "--key", "k" * 20, "--json")
    made, again = (json.loads(archipel(*call)[0]) for _ in range(2))
    assert made["rollout_id"] == again["rollout_id"]
    rollout = made["rollout_id"]
    assert archipel("model", "show", "digits", "--json")[0].count(rollout) == 1
    head, row = archipel("rollout", "list")[0].splitlines()
    assert head.split()[:6] == ["rollout", "model", "version", "state", "stage", "share"]
    assert row.split()[:7] == [rollout, "digits", "2", "soaking", "1/2", "5", "%"]
    stages = archipel("rollout", "show", rollout)[0].partition("\n\n")[2].splitlines()
    assert [line.split()[:3] for line in stages[1:]] == [["1", "5", "%"], ["2", "50", "%"]]
    for what, state in (("pause", "paused"), ("resume", "soaking"), ("abort", "rolled_back")):
        assert archipel("rollout", what, rollout)[0].strip() == state
    out, err = archipel("rollout", "watch", rollout, code=1)
    assert out == "rolled_back: stage 1 of 2, 5 %\n"
    assert err == "archipel: rollout of digits version 2 rolled_back: aborted by the operator\n"
    assert "not ended" in archipel("rollout", "watch", begin(archipel, digits), "--timeout", "0", code=1)[1]
    assert archipel("model", "rollback", "digits")[0] == "model digits: version 1 is promoted\n"


def begin(archipel: Command, digits: Path) -> str:
    return str(json.loads(archipel("rollout", "create", str(digits / "rollout.toml"), "--json")[0])["rollout_id"])


@pytest.mark.sampled(every=3)
def test_a_rollout_that_is_completed(archipel: Command, digits: Path) -> None:
    (digits / "rollout.toml").write_text(
        'model = "digits"\nversion = 2\ngate = "none"\nstages = [{percent = 10, soak_seconds = 0}]\n'
    )
    rollout = begin(archipel, digits)
    services = Services.open(load_settings(digits / "server", environment={}))
    while Coordinator(services).step():
        pass
    services.database.dispose()
    assert archipel("rollout", "watch", rollout)[0] == "completed: stage 1 of 1, 10 %\n"
    assert fields(archipel("model", "show", "digits")[0])["promoted"] == "2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = ", "rollout.toml: Invalid value"),
        (ROLLOUT.replace("max_loss = 0.01\n", ""), "neither max_loss nor worst"),
        (ROLLOUT.partition("[gate]")[0], "the field 'gate' is missing"),
        (
            ROLLOUT.replace("soak_seconds = 60", "soak = 60"),
            "stages[1]: unknown field 'soak'; there are: percent, soak_seconds",
        ),
        (ROLLOUT.replace('"higher"', '"lowr"'), "gate.better: unknown value 'lowr'; did you mean 'lower'?"),
        (ROLLOUT.replace("version = 2", "version = 0"), "version"),
        (ROLLOUT.replace("percent = 50", "percent = nan"), "percent"),
        (ROLLOUT + "patience = 3\n", "gate: unknown field 'patience'; there are: metric, range, "),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_wrong_rollout_file(archipel: Command, digits: Path, text: str, said: str) -> None:
    (digits / "rollout.toml").write_text(text)
    assert said in archipel("rollout", "create", str(digits / "rollout.toml"), code=1)[1]


@pytest.mark.sampled(every=3)
def test_the_client_walks_all_pages(archipel: Command, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import archipel.operator.connection as connection
    from archipel.cli.input_output.remote import SERVER, TOKEN
    from archipel.operator import OperatorClient

    monkeypatch.setattr(connection, "PAGE", 1)
    with OperatorClient(os.environ[SERVER], os.environ[TOKEN]) as client:
        client.models.create("alpha", "pupils")
        assert [each.name for each in client.models.list()] == ["alpha", "digits"]
        assert [each.number for each in client.models.versions("digits")] == [2, 1]
        for number in (2, 1):
            client.models.promote("digits", number)
        assert [each.version for each in client.models.promotions("digits")] == [1, 2, 1]
        made: dict[str, Any] = json.loads(archipel("rollout", "create", str(digits / "rollout.toml"), "--json")[0])
        for model in (None, "digits"):
            assert [each.rollout_id for each in client.rollouts.list(model=model)] == [made["rollout_id"]]
        assert made["rollout_id"] in archipel("rollout", "list", "--model", "digits")[0]
        assert archipel("rollout", "list", "--model", "alpha", "--json")[0].strip() == "[]"
        assert list(client.tasks.metrics(_task(client))) == []


def _task(client: OperatorClient) -> str:
    from archipel.operator import TaskRequest

    bundle = client.models.version("digits", 1).bundle
    request = TaskRequest(name="t", population="pupils", bundle=bundle, rounds=1, min_cohort=3, cohort=5)
    return str(client.tasks.create(request).task_id)


@pytest.mark.sampled(every=3)
def test_how_long_weights_are_kept(archipel: Command, digits: Path) -> None:
    shown = fields(archipel("model", "keep", "digits", "--versions", "20", "--days", "90")[0])
    assert (shown["keep_versions"], shown["keep_days"]) == ("20", "90.0")
    assert json.loads(archipel("model", "show", "digits", "--json")[0])["keep_versions"] == 20
    # What is left out is as the server's settings say.
    made = json.loads(archipel("model", "keep", "digits", "--versions", "0", "--json")[0])
    assert (made["keep_versions"], made["keep_days"]) == (0, None)
    assert "--versions" in archipel("model", "keep", "digits", "--versions", "-1", code=2)[1]
    assert "nothing" in archipel("model", "keep", "nothing", code=1)[1]
