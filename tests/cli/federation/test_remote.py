"""The commands of operators and auditors, against a server over TCP."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import make_server

from archipel import bundle as b
from archipel.cli.input_output.remote import result_line
from archipel.client import Agent, AgentConfig
from archipel.errors import RefusedError
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.sealed import decode, public_bytes
from archipel.server import create_app, init_data_folder, load_settings
from archipel.server.services import Services
from tests.support.in_thread import in_thread
from tests.support.tiny_bundle import make_bundle

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A running server without a coordinator, and tiny.bundle; address and token are in the environment."""
    folder = tmp_path / "server"
    publisher, enrolment = b.generate_key(), b.generate_key()
    b.save_private_key(publisher, tmp_path / "publisher.key")
    make_bundle(tmp_path, publisher)
    token = init_data_folder(folder, enrolment_key=public_bytes(enrolment), publisher_keys=[public_bytes(publisher)])
    b.save_public_key(b.load_private_key(folder / "server.key"), tmp_path / "server.key.pub")
    b.save_private_key(enrolment, tmp_path / "enrolment")
    settings = load_settings(folder, environment={}, smallest_answer=1)  # no devices at all
    services = Services.open(settings)
    services.prepare()
    app = create_app(settings)
    with in_thread(make_server("127.0.0.1", 0, app, threaded=True)) as web:
        monkeypatch.setenv("ARCHIPEL_SERVER", f"http://127.0.0.1:{web.server_port}")
        monkeypatch.setenv("ARCHIPEL_TOKEN", token)
        yield tmp_path
    app.extensions["archipel"].database.dispose()
    services.database.dispose()


TASK = """name = "digits"
population = "pupils"
rounds = 2
min_cohort = 3
cohort = 4
threshold = 3
eligibility = "charging"
"""


@pytest.fixture
def task(archipel: Command, served: Path) -> dict[str, Any]:
    (served / "task.toml").write_text(TASK)
    out, _ = archipel("task", "create", str(served / "task.toml"), "--bundle", str(served / "tiny.bundle"), "--json")
    made: dict[str, Any] = json.loads(out)
    return made


@pytest.mark.sampled(every=3)
def test_tasks_from_file_to_cancelled(archipel: Command, served: Path, task: dict[str, Any]) -> None:
    assert (task["state"], task["eligibility"], task["waiting"]) == ("running", "charging", 0)
    head, row = archipel("task", "list")[0].splitlines()
    assert head.split() == ["task", "name", "population", "state", "rounds", "waiting", "created"]
    assert row.split()[:6] == [task["task_id"], "digits", "pupils", "running", "0/2", "0"]
    today = time.strftime("%Y-%m-%d", time.gmtime(task["created"]))
    asked = ("task", "list", "--population", "pupils", "--state", "running", "--kind", "training", "--since")
    assert archipel(*asked, today)[0].splitlines() == [head, row]
    for others in (("--state", "paused"), ("--kind", "analytics"), ("--since", "2999-01-01"), ("--population", "x")):
        assert task["task_id"] not in archipel("task", "list", *others)[0]
    lines = archipel("task", "show", task["task_id"])[0].splitlines()
    shown = {name: " ".join(value) for name, *value in map(str.split, lines)}
    assert shown["cohort"] == "4"
    assert shown["created"] == time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(task["created"]))
    assert not {"model", "ended", "hyperparameters", "concurrency"} & set(shown)  # not yet, and nothing was asked for
    # How it stands, what it waits for, when it was made, and then the settings that were chosen.
    places = [list(shown).index(each) for each in ("name", "state", "waiting_for", "created", "cohort", "eligibility")]
    assert places == sorted(places)
    assert places[0] == 0
    assert (shown["rounds_committed"], shown["rounds"], shown["waiting"]) == ("0", "2", "0")
    usual = {"max_staleness", "staleness_exponent", "max_examples", "mode", "differential_privacy"}
    assert not usual & set(shown)
    whole = [line.split()[0] for line in archipel("task", "show", task["task_id"], "--all")[0].splitlines()]
    assert usual | set(shown) <= set(whole)
    assert whole[0] == "name"
    for what, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        assert archipel("task", what, task["task_id"])[0].strip() == state
    assert json.loads(archipel("round", "list", task["task_id"], "--json")[0]) == []
    [line] = archipel("task", "watch", task["task_id"], "--json", code=1)[0].splitlines()
    assert {name: json.loads(line)[name] for name in ("task_id", "state", "running", "model")} == {
        "task_id": task["task_id"], "state": "cancelled", "running": [], "model": None
    }  # fmt: skip
    assert "has no weights yet" in archipel("task", "download", task["task_id"], str(served / "w"), code=1)[1]
    out, err = archipel("task", "watch", task["task_id"], code=1)
    head, end = out.splitlines()
    assert head == "digits: training over pupils, secure, 0 of 2 rounds, cancelled"
    assert end.startswith("cancelled: 0 of 2 rounds in ")
    assert end.endswith(" s: cancelled by the operator")
    assert err == "archipel: task 'digits' cancelled: cancelled by the operator\n"


@pytest.mark.sampled(every=3)
def test_what_a_task_was_given_is_shown_line_by_line(archipel: Command, served: Path) -> None:
    (served / "task.toml").write_text(TASK + "[hyperparameters]\nlr = 0.02\n[deadlines]\nmasking = 30\nsharing = 5\n")
    call = ("task", "create", str(served / "task.toml"), "--bundle", str(served / "tiny.bundle"))
    lines = archipel(*call)[0].splitlines()
    assert lines[lines.index("hyperparameters") + 1].split() == ["lr", "0.02"]
    [deadlines] = [line for line in lines if line.startswith("deadlines ")]
    assert {"masking 30", "sharing 5"} <= set(deadlines.removeprefix("deadlines").strip().split(", "))
    task = next(line.split()[1] for line in lines if line.startswith("task_id"))
    lines = archipel("task", "show", task, "--all")[0].splitlines()
    below = lines[lines.index("deadlines") + 1 :]
    assert all(line.startswith("  ") for line in below[:2])
    assert {("masking", "30.0"), ("sharing", "5.0")} <= {tuple(line.split()) for line in below}


@pytest.mark.sampled(every=4)
def test_one_key_is_one_task(archipel: Command, served: Path, task: dict[str, Any]) -> None:
    call = ("task", "create", str(served / "task.toml"), "--bundle", str(served / "tiny.bundle"), "--json")
    made = [json.loads(archipel(*call, "--key", "k" * 20)[0])["task_id"] for _ in range(2)]
    assert made[0] == made[1] != task["task_id"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "task.toml: Invalid value"),
        (TASK + "cohrt = 4\n", "task.toml: unknown field 'cohrt'; did you mean 'cohort'?"),
        (
            TASK + 'mode = "async"\n',
            "mode: unknown value 'async'; there are: asynchronous, semi-synchronous, ",
        ),
        (TASK + 'kind = "zzz"\n', "kind: unknown value 'zzz'; there are: analytics, evaluation, training"),
        (TASK + "[deadlines]\nmaskin = 5\n", "deadlines: unknown value 'maskin'; did you mean 'masking'?"),
        (TASK + "[hyperparameters]\nlr = nan\n", "hyperparameters.lr: expected a finite number, got nan"),
        (TASK.replace('"charging"', '"ram > 5mb"'), "unknown unit 'mb'"),
        (TASK.replace("rounds = 2", "rounds = 0"), "rounds: expected `int` >= 1"),
        (TASK.replace("rounds = 2", ""), "the field 'rounds' is missing"),
        (TASK.replace('"pupils"', '"pupils of ours"'), "population: expected letters, digits, '.', '_' and '-'"),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_wrong_task_file(archipel: Command, served: Path, text: str, said: str) -> None:
    (served / "task.toml").write_text(text)
    bundle = str(served / "tiny.bundle")
    assert said in archipel("task", "create", str(served / "task.toml"), "--bundle", bundle, code=1)[1]


@pytest.mark.sampled(every=3)
def test_a_wrong_option(archipel: Command, served: Path) -> None:
    call = ("task", "create", str(served / "task.toml"), "--key", "abc")
    assert "'--key': expected 16 to 64 letters, digits, '-' or '_', got 'abc'" in archipel(*call, code=2)[1]
    call = ("access", "create", "x", "--role", "auditor", "-o", "x", "--days", "99999999")
    assert "'--days': 99999999.0 is not in the range 0<x<=36500" in archipel(*call, code=2)[1]
    assert (
        "'--port': 99999 is not in the range" in archipel("serve", "start", str(served), "--port", "99999", code=2)[1]
    )


@pytest.mark.sampled(every=3)
def test_a_bundle_that_is_refused(archipel: Command, served: Path) -> None:
    (served / "task.toml").write_text(TASK)
    cut = served / "cut.bundle"
    cut.write_bytes((served / "tiny.bundle").read_bytes()[:-100])
    foreign = make_bundle(served, b.generate_key(), name="foreign")
    for file, said in (
        (cut, "the bundle: "),
        (foreign, "the bundle: none of the 1 trusted keys signed this manifest; add its publisher's key to"),
    ):
        _, err = archipel("task", "create", str(served / "task.toml"), "--bundle", str(file), code=1)
        assert err.startswith(f"archipel: {file}: the body is not a bundle that this server accepts: {said}")
        assert ".part" not in err


@pytest.mark.sampled(every=3)
def test_a_token_for_somebody_else(archipel: Command, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = served / "night"
    out, _ = archipel("access", "create", "night", "--role", "auditor", "--days", "1", "-o", str(file), "--json")
    made = json.loads(out)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().strip() not in out
    assert made["expires"] == pytest.approx(made["created"] + 86400)
    assert made["token_id"] in archipel("access", "list")[0]
    monkeypatch.setenv("ARCHIPEL_TOKEN_FILE", str(file))
    archipel("task", "list")
    assert "not for the role 'auditor'" in archipel("access", "list", code=1)[1]
    monkeypatch.delenv("ARCHIPEL_TOKEN_FILE")
    assert "revoked" in archipel("access", "revoke", made["token_id"])[0]
    assert "unknown, revoked" in archipel("task", "list", "--token-file", str(file), code=1)[1]
    # No token is made that could not be kept.
    archipel("access", "create", "again", "--role", "auditor", "-o", str(file), code=1)
    assert len(json.loads(archipel("access", "list", "--json")[0])) == 1


@pytest.fixture
def tokens(archipel: Command, served: Path) -> list[Path]:
    """Four enrolment token files."""
    made = archipel(
        "token", "--enrolment-key", str(served / "enrolment"), "--server-key", str(served / "server.key.pub"),
        "--publisher-key", str(served / "server.key.pub"), "--server", os.environ["ARCHIPEL_SERVER"],
        "--population", "pupils", "--count", "4", str(served / "tokens"),
    )[0]  # fmt: skip
    return [Path(line) for line in made.splitlines()]


@pytest.mark.sampled(every=3)
def test_devices_and_populations(
    archipel: Command, served: Path, tokens: list[Path], task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archipel.operator.connection.PAGE", 2)
    agents = []
    for number, token in enumerate(tokens[:3]):
        with Agent(AgentConfig(folder=served / f"device-{number}"), examples=dict) as agent:
            agent.enrol(decode("token", token.read_bytes(), EnrolmentToken))
            agent.run_once()
            agents.append(agent)
    head, row = archipel("population", "list")[0].splitlines()
    assert head.split() == [
        "population",
        "enrolled",
        "waiting",
        "in",
        "rounds",
        "set",
        "aside",
        "revoked",
        "live",
        "tasks",
    ]
    assert row.split() == ["pupils", "3", "3", "0", "0", "0", "1"]
    gone = agents[1].device_id
    assert archipel("population", "revoke-device", gone)[0].startswith(f"{gone} revoked 20")
    assert json.loads(archipel("population", "show", "pupils", "--json")[0]) == {
        "name": "pupils", "enrolled": 2, "revoked": 1, "waiting": 2, "in_rounds": 0, "live_tasks": 1,
        "set_aside": 0, "search": None,
    }  # fmt: skip
    assert "revoked     1" in archipel("population", "show", "pupils")[0]
    assert "no device is enrolled in a population 'nobody'" in archipel("population", "show", "nobody", code=1)[1]
    head, *rows = archipel("population", "devices", "pupils")[0].splitlines()
    assert head.split()[:4] == ["device", "population", "kind", "state"]
    assert {tuple(row.split()[:4]) for row in rows} == {
        (agent.device_id, "pupils", "device", "revoked" if agent.device_id == gone else "active") for agent in agents
    }
    assert "no device is enrolled in a population 'nobody'" in archipel("population", "devices", "nobody", code=1)[1]
    archipel("population", "revoke-device", *(agent.device_id for agent in agents))
    for options, expected in (
        (("pupils", "--state", "revoked"), {agent.device_id for agent in agents}),
        (("pupils", "--state", "active"), set()),
    ):
        found = json.loads(archipel("population", "devices", *options, "--json")[0])
        assert {each["device_id"] for each in found} == expected
    shown = dict(line.rsplit(maxsplit=1) for line in archipel("population", "show-device", gone)[0].splitlines())
    assert (shown["state"], shown["rotations"], shown["rounds"]) == ("revoked", "0", "0")
    assert "device.revoke" in archipel("audit", "list")[0]


@pytest.mark.sampled(every=3)
def test_tokens_that_nobody_has_used(archipel: Command, served: Path, tokens: list[Path]) -> None:
    token = decode("token", tokens[1].read_bytes(), EnrolmentToken)
    key = json.loads(token.certificate.body)["token_key"]
    out = archipel("population", "revoke-token", str(tokens[0]), base64.b64decode(key).hex())[0]
    assert [line.split()[1] for line in out.splitlines()] == ["revoked", "revoked"]
    head, *rows = archipel("population", "revoked-tokens")[0].splitlines()
    assert head.split() == ["token", "public", "key", "population", "revoked"]
    assert {row.split()[0] for row in rows} == {line.split()[0] for line in out.splitlines()}
    assert {row.split()[2] for row in rows} == {"pupils", "-"}
    with Agent(AgentConfig(folder=served / "device"), examples=dict) as agent:
        for file in tokens[:2]:
            with pytest.raises(RefusedError, match="was revoked"):
                agent.enrol(decode("token", file.read_bytes(), EnrolmentToken))
        agent.enrol(decode("token", tokens[2].read_bytes(), EnrolmentToken))
    assert f"used by device {agent.device_id}" in archipel("population", "revoke-token", str(tokens[2]), code=1)[1]
    # The token itself stays where it is: the private half is not for the server.
    assert token.seed not in (served / "server" / "archipel.db").read_bytes()
    junk = served / "junk"
    for content in (b"x" * 100_000, b"-----BEGIN PRIVATE KEY-----\nsecret"):
        junk.write_bytes(content)
        said = archipel("population", "revoke-token", str(junk), code=1)[1]
        assert said.startswith(f"archipel: {junk}: expected an enrolment token")
        assert "secret" not in said
    assert "No such file" in archipel("population", "revoke-token", "z" * 64, code=1)[1]


@pytest.mark.sampled(every=4)
def test_without_a_token_or_a_server(archipel: Command, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARCHIPEL_TOKEN")
    assert "set ARCHIPEL_TOKEN" in archipel("task", "list", code=1)[1]
    monkeypatch.delenv("ARCHIPEL_SERVER")
    assert "Missing option '--server' (env var: 'ARCHIPEL_SERVER')" in archipel("task", "list", code=2)[1]


@pytest.mark.sampled(every=3)
def test_the_audit_log_and_its_heads(archipel: Command, served: Path, task: dict[str, Any]) -> None:
    listed = archipel("audit", "list")[0]
    assert "task.create" in listed
    assert "population=pupils" in listed
    for limit, numbers in (("1", ["2"]), ("2", ["1", "2"]), ("99", ["1", "2"])):
        _, *rows = archipel("audit", "list", "--limit", limit)[0].splitlines()
        assert [row.split()[0] for row in rows] == numbers
    check = ("audit", "verify", "--server-key", str(served / "server.key.pub"), "--head", str(served / "heads"))
    assert archipel(*check)[0].startswith("good: 2 entries, 0 kept heads")
    archipel("task", "cancel", task["task_id"])
    assert archipel(*check)[0].startswith("good: 3 entries, 1 kept heads")
    assert archipel(*check)[0].startswith("good: 3 entries, 2 kept heads")
    assert len((served / "heads").read_bytes().splitlines()) == 2
    # Somebody with the database makes the log anew, in which the task was never cancelled.
    with sqlite3.connect(served / "server" / "archipel.db") as database:
        database.execute("DROP TRIGGER audit_no_delete")
        database.execute("DELETE FROM audit WHERE seq = 3")
    assert "entry 3 was there when the head was kept" in archipel(*check, code=1)[1]
    lines = (served / "heads").read_text()
    (served / "heads").write_text(lines + "junk\n")
    said = "expected a head that this server signed"
    assert archipel(*check, code=1)[1].startswith(f"archipel: {served}/heads, line 3: {said}")
    (served / "heads").write_text(lines)
    first, *others = lines.splitlines()
    head = json.loads(first)
    signature = bytearray(base64.b64decode(head["signature"]))
    signature[0] ^= 1
    head["signature"] = base64.b64encode(signature).decode()
    (served / "heads").write_text("\n".join([json.dumps(head), *others]) + "\n")
    assert "does not verify" in archipel(*check, code=1)[1]


@pytest.mark.sampled(every=3)
def test_a_bundle_is_named_once(archipel: Command, served: Path) -> None:
    file = served / "twice.toml"
    file.write_text(f'bundle = "{"0" * 64}"\n{TASK}')
    said = archipel("task", "create", str(file), "--bundle", str(served / "tiny.bundle"), code=1)[1]
    assert "it names a bundle, and so does --bundle" in said
    (served / "never.toml").write_text(TASK)
    said = archipel("task", "create", str(served / "never.toml"), code=1)[1]
    assert "never.toml: no bundle; give --bundle FILE.bundle, or the digest" in said
    said = archipel("task", "create", str(served / "tiny.bundle"), code=1)[1]
    assert "tiny.bundle: no TOML, which is text in UTF-8" in said


def test_a_number_that_is_a_bound_is_marked() -> None:
    result = RoundResult(devices=3, metrics={"loss": 0.0468, "accuracy": 0.99}, clamped={"loss": 0.4})
    assert result_line(result) == "loss 0.0468 (beyond its range), accuracy 0.99"


@pytest.mark.parametrize("name", ["../../x", "%00", "", "a b", ".."])
@pytest.mark.sampled(every=6)
def test_what_is_no_id_leads_nowhere(archipel: Command, served: Path, name: str) -> None:
    assert "expected the id of a task" in archipel("task", "show", name, code=1)[1]
    assert "expected an id or a name" in archipel("population", "show", name, code=1)[1]
