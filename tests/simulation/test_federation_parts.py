"""A federation's file with examples of the server's own, and with several models: what it says is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipel
from archipel import datasets
from archipel.errors import SimulationError
from archipel.simulation import SplitClients
from archipel.simulation.federation import load_federation
from archipel.training import losses, optimizers
from tests.strategies.test_feddistill import wide
from tests.support.fixtures.federation_files import *  # noqa: F403
from tests.support.fixtures.federation_files import DATA, FILE, Write, loaded
from tests.support.simulation import dense, imported

ROOTED = 'privacy = "plain"\naggregation = { rule = "fltrust" }\n'
OPTIONS: dict[str, Any] = {
    "rounds": 2, "cohort": 2, "seed": 5, "epochs": 2, "batch_size": 4, "client_axis": "off",
    "loss": losses.cross_entropy(), "optimizer": optimizers.sgd(lr=0.2),
}  # fmt: skip


def same_parameters(found: Any, expected: Any) -> None:
    assert [row.failed for row in found.history] == [""] * len(found.history)
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)


def simulated(data: dict[str, np.ndarray], rest: np.ndarray, root: dict[str, np.ndarray]) -> Any:
    parts = datasets.split_iid(len(rest), 4, seed=5)
    devices = SplitClients({"input": data["x"][rest], "label": data["y"][rest]}, parts)
    return archipel.simulate(imported(dense), devices, privacy="plain", aggregation="fltrust", root=root, **OPTIONS)


@pytest.mark.sampled(every=3)
def test_rows_of_the_training_data_are_the_servers_own_and_on_no_device(write: Write, tmp_path: Path) -> None:
    data, rows = loaded(tmp_path), [3, 11, 30, 31, 50]
    rest = np.array([row for row in range(len(data["y"])) if row not in rows])
    federation = load_federation(write(DATA + ROOTED + f"root = {{ rows = {rows} }}"), ["rounds=2"])
    expected = simulated(data, rest, {"input": data["x"][rows], "label": data["y"][rows]})
    same_parameters(federation.run(), expected)


def test_a_share_of_the_training_data_is_the_servers_own(write: Write, tmp_path: Path) -> None:
    data = loaded(tmp_path)
    federation = load_federation(write(DATA + ROOTED + "root = { share = 0.2 }"), ["rounds=2"])
    prepared = federation.prepare()
    assert prepared.root is not None
    assert set(prepared.root) == {"input", "label"}
    everything = [prepared.root["input"], *(prepared.clients.take(number)["input"] for number in range(4))]
    assert len(everything[0]) == round(0.2 * len(data["y"]))
    key = lambda rows: sorted(map(tuple, rows.tolist()))  # noqa: E731
    assert key(np.concatenate(everything)) == key(data["x"])
    # The test data stay what they are without a root.
    held = DATA.replace('test = "test.npz"', "hold_out = 0.25")
    tests = [load_federation(write(held + more)).prepare().test for more in ("", ROOTED + "root = { share = 0.2 }")]
    np.testing.assert_array_equal(tests[0]["input"], tests[1]["input"])  # type: ignore[index,call-overload]


@pytest.mark.sampled(every=3)
def test_a_file_has_the_servers_own_examples(write: Write, tmp_path: Path) -> None:
    data = loaded(tmp_path)
    np.savez(tmp_path / "trusted.npz", x=data["x"][:9].astype(np.float64), y=data["y"][:9])
    federation = load_federation(write(DATA + ROOTED + 'root = { data = "trusted.npz" }'), ["rounds=2"])
    expected = simulated(data, np.arange(len(data["y"])), {"input": data["x"][:9], "label": data["y"][:9]})
    same_parameters(federation.run(), expected)
    # Devices that are divided already have no rows to give.
    own = 'data = { python = "own.py:divided" }\ncohort = 2\n' + ROOTED + 'root = { data = "trusted.npz" }'
    found = load_federation(write(own, FILE.replace("cohort = 2\n", "")), ["rounds=1"]).run()
    assert found.history[0].failed == ""
    with pytest.raises(SimulationError, match=r"root\.share: the data are divided over devices already; give root\."):
        load_federation(write(own, FILE.replace("cohort = 2\n", "")), ["root={share=0.1}"]).prepare()


@pytest.mark.sampled(every=3)
def test_the_clock_times_a_file_with_a_root(write: Write, tmp_path: Path) -> None:
    """The trace's fifth row is the root's: nine examples in batches of 4, twice, are six steps of 30 s."""
    data = loaded(tmp_path)
    np.savez(tmp_path / "trusted.npz", x=data["x"][:9], y=data["y"][:9])
    (tmp_path / "trace.csv").write_text("seconds_per_step,down,up\n" + "0.5,,\n" * 4 + "30,,\n")
    more = 'root = { data = "trusted.npz" }\nsystem = { devices = "trace.csv" }'
    found = load_federation(write(DATA + ROOTED + more), ["rounds=1"]).run()
    assert found.history[0].time == 6 * 30.0


MODELS = """
strategy = "feddistill"
[[models]]
onnx = "network.onnx"
{first}
[[models]]
onnx = "wide.onnx"
{second}
"""


def with_models(tmp_path: Path, first: str = "", second: str = "") -> tuple[str, str]:
    """(more, text) for `write`."""
    imported(wide).save(tmp_path / "wide.onnx")
    return DATA + MODELS.format(first=first, second=second), FILE.replace('model = {{ onnx = "network.onnx" }}\n', "")


@pytest.mark.parametrize(
    ("first", "second", "model_of"),
    [("", "", None), ("clients = [0, 3]", "", [0, 1, 1, 0]), ("clients = [1]", "clients = [0, 2, 3]", [1, 0, 1, 1])],
)
@pytest.mark.sampled(every=4)
def test_devices_have_the_models_that_the_file_says(
    write: Write,
    tmp_path: Path,
    first: str,
    second: str,
    model_of: list[int] | None,
) -> None:
    found = load_federation(write(*with_models(tmp_path, first, second)), ["rounds=2"]).run()
    data = loaded(tmp_path)
    devices = SplitClients({"input": data["x"], "label": data["y"]}, datasets.split_iid(len(data["y"]), 4, seed=5))
    expected = archipel.simulate(
        [imported(dense), imported(wide)], devices, "feddistill", model_of=model_of,
        test=(data["x"][:10], data["y"][:10]), **OPTIONS,
    )  # fmt: skip
    same_parameters(found, expected)
    assert [row.tested for row in found.history] == [row.tested for row in expected.history]


def test_a_setting_changes_one_of_the_models(write: Write, tmp_path: Path) -> None:
    file = write(*with_models(tmp_path))
    federation = load_federation(file, ["models.1.clients=[2]", "models.0.onnx=wide.onnx"])
    assert [each.onnx for each in federation.settings.models] == ["wide.onnx", "wide.onnx"]
    assert federation.prepare().model_of == [0, 0, 1, 0]


def mistakes(file: Path, settings: list[str], text: str) -> None:
    with pytest.raises(SimulationError) as told:
        load_federation(file, ["rounds=1", *settings]).run()
    assert str(told.value).startswith(f"{file}: ")
    assert text in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["root={}"], "root: give one of share, rows and data, got none"),
        (["root={share=0.1, rows=[1]}"], "root: give one of share, rows and data, got ['share', 'rows']"),
        (["root={part=0.1}"], "root: unknown field 'part'"),
        (["root.share=1.0"], "root.share: expected `float` < 1.0, got 1.0"),
        (["root.rows=[]"], "root.rows: expected one row or more, each once"),
        (["root.rows=[1, 2, 1]"], "root.rows: expected one row or more, each once"),
        (["root.rows=[-1]"], "root.rows[0]: expected `int` >= 0"),
        (["root.rows=[52]"], "root.rows: no row 52; the training data have 0 to 51"),
        ([f"root.rows={list(range(52))}"], "root.rows: has all 52 rows of the training data"),
        (["root.data=none.npz"], "none.npz"),
        (["root.share=0.1", "aggregation.rule=median"], "root: rule 'median' takes no update as a root; set rule 'flt"),
        (["task.root=" + "0" * 32, "aggregation.rule=krum"], "task.root: rule 'krum' takes no update as a root"),
        (
            ["aggregation.root=" + "0" * 32],
            "aggregation.root: is a device of a server; write it into [task], as `root`",
        ),
        ([], "aggregation 'fltrust': needs examples of the server's own; give root"),
    ],
)
def test_mistakes_about_the_root_are_told(write: Write, settings: list[str], text: str) -> None:
    mistakes(write(DATA + ROOTED), settings, text)


def test_rows_and_a_share_to_test_with_are_not_both_taken(write: Write) -> None:
    held = DATA.replace('test = "test.npz"', "hold_out = 0.25")
    mistakes(
        write(held + ROOTED), ["root.rows=[1]"], "root.rows: data.hold_out takes rows of the training data as well"
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["model.zoo=lenet"], "model: give a table [model], or of devices with different models several [[models]]"),
        (["models=[]"], "model: give a table [model], or of devices with different models several [[models]]"),
        (['models=[{onnx="wide.onnx"}]'], "models: there is one; write it as [model]"),
        (["models.1.zoo=lenet"], "models[1]: give one of zoo, onnx, bundle, python, got ['zoo', 'onnx']"),
        (["models.1.hidden=3"], "models[1]: unknown field 'hidden'"),
        (["models.1.onnx=none.onnx"], "models[1]: "),
        (["models.1.arguments.classes=3"], "models[1].arguments: are for zoo and python; onnx has none"),
        (["models.0.clients=[1, 2]", "models.1.clients=[2]"], "models[1].clients: device 2 has models[0] already"),
        (["models.0.clients=[1, 1]"], "models[0].clients: device 1 has models[0] already"),
        (
            ["models.0.clients=[1]", "models.1.clients=[2]"],
            "models: none has device 0, 3; leave `clients` out of the mo",
        ),
        (["models.0.clients=[4]"], "models[0].clients: no device 4; there are 0 to 3"),
        (["models.0.clients=[-4]"], "models[0].clients[0]: expected `int` >= 0"),
        (["strategy=fedavg"], "model: number 1 has other parameters to share than the first"),
        (["models.2.zoo=lenet"], "--set models.2.zoo=lenet: models has no 2, but 0 to 1"),
        (["models.zoo.x=lenet"], "--set models.zoo.x=lenet: models has no zoo, but 0 to 1"),
        (["models.0=lenet"], "--set models.0=lenet: models is no table"),
    ],
)
@pytest.mark.sampled(every=6)
def test_mistakes_about_several_models_are_told(
    write: Write,
    tmp_path: Path,
    settings: list[str],
    text: str,
) -> None:
    mistakes(write(*with_models(tmp_path)), settings, text)


def test_one_model_without_devices_has_the_rest(write: Write, tmp_path: Path) -> None:
    more, text = with_models(tmp_path, "clients = [1]")
    third = more + '[[models]]\nonnx = "wide.onnx"\n'
    mistakes(write(third, text), [], "models[2].clients: is missing, as in models[1]; one has the rest")


def test_a_task_takes_what_applies_to_it(write: Write, tmp_path: Path) -> None:
    device = "0123456789abcdef" * 2
    task = 'task = { name = "a", population = "pupils", min_cohort = 2 }\n'
    file = write(DATA + ROOTED + "root = { share = 0.2 }\n" + task)
    with pytest.raises(SimulationError, match=r"as a task: task\.root: is missing; a server has no examples"):
        load_federation(file).task_request("0" * 64)
    request = load_federation(file, [f"task.root={device}"]).task_request("0" * 64)
    assert (request.aggregation.rule, request.aggregation.root) == ("fltrust", device)
    with pytest.raises(SimulationError, match=r"as a task: .*root"):
        load_federation(file, ["task.root=somebody"]).task_request("0" * 64)
    more, text = with_models(tmp_path)
    file = write(more, text)
    with pytest.raises(SimulationError, match=r"as a task: models: all devices of a task have one bundle; write the"):
        load_federation(file).task_request("0" * 64)
