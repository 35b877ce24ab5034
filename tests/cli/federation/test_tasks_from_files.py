"""One file for both: a server's task is made from a federation's file, and done again on local data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import save_public_key
from archipel.simulation import load_federation
from tests.support.commands import Command
from tests.support.federation import Federation
from tests.support.fixtures.federation import *  # noqa: F403

FILE = """
rounds = 3
cohort = 4
hyperparameters = {{ lr = 0.05 }}
model = {{ bundle = "{bundle}", key = ["publisher.pub"] }}
data = {{ train = "data.npz", test = "data.npz" }}
partition = {{ how = "iid", clients = 5 }}
task = {{ name = "linear", population = "pupils", min_cohort = 3, threshold = 3 }}
"""


ROBUST = """
privacy = "plain"
aggregation = { rule = "median", tolerated = 1 }
"""


@pytest.mark.sampled(every=4)
def test_a_task_is_made_of_the_file_and_simulated(
    federation: Federation, archipel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIPEL_TOKEN", federation.operator_token)
    save_public_key(federation.publisher_key, tmp_path / "publisher.pub")
    data = [federation.data(number) for number in range(8)]
    np.savez(tmp_path / "data.npz", **{name: np.concatenate([each[name] for each in data]) for name in data[0]})
    file = tmp_path / "federation.toml"
    file.write_text(FILE.format(bundle=federation.bundle_file))
    server = ("--server", federation.url)
    out, _ = archipel("task", "create", "--from", str(file), "--json", *server)
    made = federation.operator.tasks.get(json.loads(out)["task_id"])
    assert (made.rounds, made.cohort, made.min_cohort, made.privacy) == (3, 4, 3, "secure")
    assert (made.name, made.population, made.hyperparameters) == ("linear", "pupils", {"lr": 0.05})
    expected = load_federation(file).run()
    assert made.bundle == expected.bundle.digest
    # The file says of the task no more than what the data are; what it says of the model is not read.
    text = FILE.replace('bundle = "{bundle}"', 'zoo = "lenet"').replace("rounds = 3", "rounds = 9")
    file.write_text(text.replace("cohort = 4\n", "strategy = 'scaffold'\n").replace("lr = 0.05", "lr = 9.0").format())
    out, _ = archipel("simulate", str(file), "--from-task", made.task_id[:8], "--json", *server)
    found = json.loads(out)
    assert [row["tested"] for row in found["rounds"]] == [row.tested for row in expected.history]
    assert len(found["rounds"]) == 3
    assert found["rounds"][-1]["tested"]["mse"] < found["rounds"][0]["tested"]["mse"]


@pytest.mark.sampled(every=6)
def test_a_robust_rule_goes_with_the_file_and_with_the_task(
    federation: Federation,
    bundle_maker: Callable[..., Path],
    archipel: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARCHIPEL_TOKEN", federation.operator_token)
    save_public_key(federation.publisher_key, tmp_path / "publisher.pub")
    data = [federation.data(number) for number in range(8)]
    np.savez(tmp_path / "data.npz", **{name: np.concatenate([each[name] for each in data]) for name in data[0]})
    file, server = tmp_path / "federation.toml", ("--server", federation.url)
    bundle = bundle_maker(federation.publisher_key, modes=("secure", "plain"))
    text = FILE.replace(", threshold = 3", "").format(bundle=bundle)
    file.write_text(ROBUST + text)
    other = ("--aggregation", "trimmed-mean", "--mixing", "nnm")
    asked = [
        json.loads(archipel("task", "create", "--from", str(file), "--json", *more, *server)[0])["aggregation"]
        for more in ((), other, ("--aggregation", "krum", "--tolerated", "0"))
    ]
    assert [(each["rule"], each["tolerated"], each["mixing"]) for each in asked] == [
        ("median", 1, ""), ("trimmed-mean", 1, "nnm"), ("krum", 0, ""),
    ]  # fmt: skip
    task = tmp_path / "task.toml"
    task.write_text("name='a'\npopulation='pupils'\nrounds=1\nmin_cohort=3\ncohort=4\nprivacy='plain'\n")
    given = ("--bundle", str(bundle), "--aggregation", "median", "--tolerated", "1")
    made = json.loads(archipel("task", "create", str(task), *given, "--json", *server)[0])
    assert made["aggregation"]["rule"] == "median"
    expected = load_federation(file, ["rounds=1", "hyperparameters={}"]).run()
    file.write_text(text)
    found = json.loads(archipel("simulate", str(file), "--from-task", made["task_id"], "--json", *server)[0])
    assert [row["tested"] for row in found["rounds"]] == [row.tested for row in expected.history]
    groups = text.replace("cohort = 4", "cohort = 6").replace("clients = 5", "clients = 6")
    file.write_text('secure_groups = 2\naggregation = { rule = "trimmed-mean" }\n' + groups)
    expected = load_federation(file).run()
    made = json.loads(archipel("task", "create", "--from", str(file), "--json", *server)[0])
    assert (made["secure_groups"], made["aggregation"]["rule"], made["threshold"]) == (2, "trimmed-mean", 2)
    file.write_text(groups)
    asked = ("--aggregation", "trimmed-mean", "--secure-groups", "2")
    again = json.loads(archipel("task", "create", "--from", str(file), *asked, "--json", *server)[0])
    assert {**again, "task_id": "", "created": 0} == {**made, "task_id": "", "created": 0}
    found = json.loads(archipel("simulate", str(file), "--from-task", again["task_id"], "--json", *server)[0])
    assert [row["tested"] for row in found["rounds"]] == [row.tested for row in expected.history]
    file.write_text(text)
    _, err = archipel("task", "create", "--from", str(file), "--aggregation", "best", *server, code=1)
    assert err.startswith(
        f"archipel: {file}: aggregation: rule: there is no 'best'; there are: mean, centered-clipping"
    )
    _, err = archipel("task", "create", "--from", str(file), "--aggregation", "median", *server, code=1)
    assert "needs single updates, which secure rounds hide" in err


@pytest.mark.sampled(every=4)
def test_the_root_device_of_fltrust_goes_with_both_files(
    federation: Federation,
    bundle_maker: Callable[..., Path],
    archipel: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server says that it knows no such device, so the id has come as far as that."""
    monkeypatch.setenv("ARCHIPEL_TOKEN", federation.operator_token)
    bundle, server = bundle_maker(federation.publisher_key, modes=("secure", "plain")), ("--server", federation.url)
    file, task, device = tmp_path / "federation.toml", tmp_path / "task.toml", "0" * 31 + "1"
    rule = 'privacy = "plain"\naggregation = { rule = "fltrust" }\n'
    text = rule + FILE.replace(", threshold = 3", "").format(bundle=bundle)
    common = "name='a'\npopulation='pupils'\nrounds=1\nmin_cohort=3\ncohort=4\nprivacy='plain'\n"
    given = ("--bundle", str(bundle))
    for name, written, options in (
        ("--from", text.replace("min_cohort = 3", f"min_cohort = 3, root = '{device}'"), ()),
        ("--from", text, ("--root", device)),
        ("", common + f"aggregation = {{ rule = 'fltrust', root = '{device}' }}", given),
        ("", common, (*given, "--aggregation", "fltrust", "--root", device)),
    ):
        (file if name else task).write_text(written)
        where = (name, str(file)) if name else (str(task),)
        _, err = archipel("task", "create", *where, *options, *server, code=1)
        assert f"aggregation.root: no device {device} in population 'pupils'" in err
    file.write_text(text)
    _, err = archipel("task", "create", "--from", str(file), *server, code=1)
    assert err.startswith(f"archipel: {file}: as a task: task.root: is missing; a server has no examples of its own")
    file.write_text(text.replace('"fltrust"', f'"fltrust", root = "{device}"'))
    _, err = archipel("task", "create", "--from", str(file), *server, code=1)
    assert err == f"archipel: {file}: aggregation.root: is a device of a server; write it into [task], as `root`\n"


def test_what_is_missing_is_told(archipel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ARCHIPEL_SERVER", "ARCHIPEL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "federation.toml"
    file.write_text(FILE.replace('bundle = "{bundle}", key = ["publisher.pub"]', 'zoo = "lenet"').format())
    _, err = archipel("simulate", str(file), "--from-task", "1234", code=1)
    assert err == "archipel: --from-task asks a server; give --server, or set ARCHIPEL_SERVER\n"
    monkeypatch.setenv("ARCHIPEL_TOKEN", "t" * 43)
    server = ("--server", "http://127.0.0.1:9")
    _, err = archipel("task", "create", "--from", str(file), *server, code=1)
    assert err == (
        f"archipel: {file}: its model is no bundle; make one with `archipel convert`, and give it as --bundle\n"
    )
    _, err = archipel("task", "create", *server, code=1)
    assert err == "archipel: give FILE, a task's, or --from FEDERATION.toml, one of them\n"
