"""`archipel up`: from an ONNX file and an .npz to a federated model, in one command."""

from __future__ import annotations

import io
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import parser
from rich.console import Console

from archipel.bundle import generate_key, save_public_key
from archipel.bundle.roles import Hyperparameter, Update
from archipel.cli.input_output.publisher_keys import read_signing_key
from archipel.cli.start.up.data import Data, read_data, split
from archipel.cli.start.up.prepare import Plan, prepare
from archipel.cli.start.up.running import finish, print_next
from archipel.cli.start.up.watching import round_line
from archipel.datasets import (
    split_by,
    split_dirichlet,
    split_iid,
    split_labels,
    split_shards,
    split_sorted,
    write_records,
)
from archipel.errors import ArchipelError
from archipel.protocol.operator.registry import RoundMetrics
from tests.support.commands import Command
from tests.support.small_federation import NET, up


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((9, 4), np.float32)}, "no labels; name them `y` (it has x)"),
        ({"image": np.zeros((9, 4)), "y": np.zeros(9, int)}, "name them `features`, or `x` (it has image, y)"),
        ({"x": np.zeros((9, 5)), "y": np.zeros(9, int)}, "entry 'features' must be float32[n, 4], is float32[9, 5]"),
        ({"x": np.zeros((9, 4)), "y": np.zeros(8, int)}, "in each field, 1 or more, got features 9, y 8"),
        ({"x": np.zeros((9, 4)), "y": np.arange(9)}, "row 3 has label 3, but the model answers 3 numbers"),
        ({"x": np.zeros((9, 4)), "y": np.ones(9, int)}, "all labels are 1: of one class a model learns nothing"),
        ({"x": np.zeros((9, 4)), "y": np.zeros(9)}, "the labels are float32[9], but --loss mse of this model takes"),
        ({"x": np.zeros((0, 4)), "y": np.zeros(0, int)}, "in each field, 1 or more, got features 0, y 0"),
        ({"x": np.full((9, 4), np.nan), "y": np.zeros(9, int)}, "wrong.npz: x: is not finite in row 0; mend"),
        ({"x": np.zeros((1, 4)), "y": np.zeros(1, int)}, "1 examples are too few for 2 devices"),
        ({"x": np.zeros((9, 4)), "y": np.full(9, "cat")}, "number texts by numpy.unique(y, return_inverse=True)[1]"),
    ],
)  # fmt: skip
def test_wrong_data_are_told_before_anything_starts(
    folder: Path, archipel: Command, arrays: dict[str, np.ndarray], words: str
) -> None:
    np.savez(folder / "wrong.npz", **arrays)
    _, err = archipel(
        "up", str(folder / "model.onnx"), str(folder / "wrong.npz"), "--devices", "2", "--folder", str(folder / "f"),
        code=1,
    )  # fmt: skip
    assert words in err
    assert not (folder / "f").exists()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("iid", lambda data: split_iid(60, 3, seed=4)),
        ("dirichlet:0.5", lambda data: split_dirichlet(data.labels, 3, alpha=0.5, seed=4)),
        ("dirichlet:alpha=0.5", lambda data: split_dirichlet(data.labels, 3, alpha=0.5, seed=4)),
        ("by-a=b", lambda data: split_by(data.others["a=b"], 3, seed=4)),
        ("sorted:age", lambda data: split_sorted(data.others["age"], 3, seed=4)),
        ("shards:3", lambda data: split_shards(data.labels, 3, shards=3, seed=4)),
        ("labels", lambda data: split_labels(data.labels, 3, seed=4)),
    ],
)
def test_splits_are_those_of_datasets(how: str, expected: Callable[[Data], list[np.ndarray]]) -> None:
    rows = np.arange(60)
    data = Data(Path("data.npz"), {"x": rows}, rows % 4, {"a=b": rows % 7, "age": rows[::-1] % 11})
    for found, wanted in zip(split(data, how, 3, 4), expected(data), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_wrong_splits_are_told(folder: Path, archipel: Command) -> None:
    for how, words in (
        ("by-place", "data.npz: no field 'place'; beside inputs and labels the data have person"),
        ("dirichlet:x", "--split alpha=x: expected a number, got 'x'"),
        ("dirichlet", "--split dirichlet: alpha is missing; write dirichlet:alpha=VALUE"),
        ("sorted", "--split sorted: field is missing; write sorted:field=VALUE"),
        ("labels:9", "--split labels:9, --devices 8: "),
        ("shards:2,alpha=3", "shards has no option 'alpha'; there are shards (a whole number, default 2)"),
        ("dirichlet:0", "--split dirichlet:0, --devices 8: "),
        ("half", "expected by-FIELD, or one of iid, dirichlet, by, shards"),
        ("by-person", "7 groups are too few for 8 devices"),
    ):
        _, err = archipel(
            "up", str(folder / "model.onnx"), str(folder / "data.npz"), "--split", how, "--folder", str(folder / "f"),
            code=1,
        )  # fmt: skip
        assert words in err, how


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--strategy fedrep", "needs --strategy-option personal=VALUE"),
        ("--strategy fedprox --strategy-option mu=-1", "--strategy-option mu must be a number at least 0"),
        ("--strategy-option mu=1", "fedavg has no option 'mu'; there are clip"),
        ("--strategy fedbn", "--batch-norm folded leaves none"),
        ("--loss-output ghost", "--loss-output: the model has no output 'ghost'; its outputs are logits"),
        ("--epochs 20000", "--epochs: expected a whole number from 1 to 10000"),
    ],
)
def test_wrong_options_are_told_as_options(folder: Path, archipel: Command, options: str, words: str) -> None:
    model, data = str(folder / "model.onnx"), str(folder / "data.npz")
    _, err = archipel("up", model, data, "--folder", str(folder / "f"), *options.split(), code=1)
    assert words in err
    assert not (folder / "f").exists()


def test_options_of_the_strategy_reach_the_bundle(folder: Path) -> None:
    plan = Plan(
        model="", data="", devices=2, rounds=1, split="iid", strategy="fedprox", loss="", optimizer="sgd", lr=0.1,
        epochs=1, batch_size=16, seed=0, evaluate_every=0, hold_out=0.1, strategy_option=("mu=0.3", "clip=2"),
    )  # fmt: skip
    made = prepare(folder / "f", folder / "model.onnx", folder / "data.npz", plan, generate_key())
    ports = made.bundle.manifest.programs["train"].inputs
    assert {port.name: port.default for port in ports if isinstance(port, Hyperparameter)}["mu"] == 0.3
    updates = [port for port in made.bundle.manifest.programs["finish"].outputs if isinstance(port, Update)]
    assert {port.clip for port in updates if port.kind == "delta"} == {2.0}


@pytest.mark.sampled(every=3)
def test_a_bundle_says_itself_how_devices_train(folder: Path, archipel: Command) -> None:
    model, data, made = str(folder / "model.onnx"), str(folder / "data.npz"), folder / "f"
    bundle, predicts = str(folder / "own.bundle"), str(folder / "predicts.bundle")
    archipel("convert", model, "-o", predicts)
    archipel(
        "convert", model, "-o", bundle, "--loss", "cross_entropy", "--lr", "0.3", "--policy-option", "min_cohort=3"
    )
    for given, options, words in (
        (bundle, ["--lr", "0.1", "--loss", "mse"], "the bundle decides --loss, --lr; leave it out, or convert anew"),
        (bundle, ["--devices", "3"], "asks for rounds of at least 4 devices, --devices is 3; take more devices"),
        (predicts, [], "only predicts; make a bundle that trains: archipel convert ... --loss NAME"),
    ):
        _, err = archipel("up", given, data, "--folder", str(made), *options, code=1)
        assert words in err
        assert not made.exists()
    plan = Plan(
        model="", data="", devices=4, rounds=1, split="iid", strategy="fedavg", loss="", optimizer="sgd", lr=0.1,
        epochs=1, batch_size=16, seed=0, evaluate_every=0, hold_out=0.1,
    )  # fmt: skip
    prepared = prepare(made, Path(bundle), Path(data), plan, read_signing_key(None))
    assert prepared.sizes == [54] * 4
    assert prepared.plan.min_cohort == 4
    assert (made / "model.bundle").read_bytes() == Path(bundle).read_bytes()
    with np.load(made / "devices/1/data.npz") as own:
        assert own["features"].shape == (54, 4)
        assert own["label"].dtype == np.int64


def test_a_table_is_examples_too(folder: Path) -> None:
    file = folder / "table.csv"
    file.write_text("a,b,y,c\n1,2,0,3\n4,5.5,1,6\n")
    read = read_data(file, [("features", "float32")])
    np.testing.assert_array_equal(read.inputs["features"], np.array([[1, 2, 3], [4, 5.5, 6]], np.float32))
    assert read.labels.tolist() == [0, 1]
    assert read.classes == 2
    for text, words in (
        ("a,b,y\n1,2\n", "table.csv, line 2: expected 3 cells, one for each column"),
        ("a,y\n1,3\n\n2,cat\n", "table.csv, line 4: 'cat' in column 'y' is no number"),
        ("a,y\nfour,1\n", "column 'a' has texts ('four')"),
        ("a,y\n1,inf\n2,1\n", "table.csv: label: is not finite in row 0"),
        ("a,y\nnan,1\n2,1\n", "table.csv, line 2: no value in column 'a'"),
        ("a,y\n", "no rows"),
        ("a\n1\n", "no labels"),
        ("1,0\n2,1\n", "line 1 has numbers; write a head"),
        ("gr\xf6\xdfe,y\n1,0\n", "no text in UTF-8"),
    ):
        file.write_text(text, "latin-1")
        with pytest.raises(ArchipelError) as raised:
            read_data(file, [("features", "float32")])
        assert words in str(raised.value)
    file.write_text("a,LABEL,b\n1,yes,2\n3,no,4\n")
    read = read_data(file, [("features", "float32")])
    assert read.labels.tolist() == [1, 0]  # texts are classes in the order of the alphabet
    records = folder / "records.parquet"
    write_records({"features": np.ones((3, 2), np.float32), "label": np.arange(3), "person": np.arange(3)}, records)
    read = read_data(records, [("features", "float32")])
    assert (read.classes, list(read.others)) == (3, ["person"])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("answers", "labels", "loss"),
    [
        (3, [0, 1, 2], "cross_entropy"),
        (1, [0, 1, 1], "binary_cross_entropy"),
        (1, [25, 346, 141], "mse"),
        (1, [0.5, 1.5, 2.0], "mse"),
        (3, [[0], [1], [2]], "cross_entropy"),
    ],
)
def test_model_and_labels_choose_the_loss(tmp_path: Path, answers: int, labels: list[float], loss: str) -> None:
    text = NET.replace("3]", f"{answers}]") % ", ".join(["0"] * 4 * answers)
    onnx.save(parser.parse_model(text), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=np.eye(3, 4, dtype=np.float32), y=np.array(labels))
    plan = Plan(
        model="", data="", devices=2, rounds=1, split="iid", strategy="fedavg", loss="", optimizer="sgd", lr=0.1,
        epochs=1, batch_size=16, seed=0, evaluate_every=0, hold_out=0,
    )  # fmt: skip
    made = prepare(tmp_path / "f", tmp_path / "model.onnx", tmp_path / "data.npz", plan, generate_key())
    assert made.plan.loss == loss
    assert made.doubt == ""
    if answers == 1 and loss != "mse":
        # The same numbers as floats are amounts, and whoever meant classes is told.
        np.savez(tmp_path / "data.npz", x=np.eye(3, 4, dtype=np.float32), y=np.array(labels, float))
        made = prepare(tmp_path / "g", tmp_path / "model.onnx", tmp_path / "data.npz", plan, generate_key())
        assert made.plan.loss == "mse"
        assert "store whole numbers: y.astype(int)" in made.doubt


def test_another_folder_is_left_alone(folder: Path, archipel: Command) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/thesis.txt").write_text("chapter 1")
    _, err = archipel(
        "up", str(folder / "model.onnx"), str(folder / "data.npz"), "--folder", str(folder / "mine"), code=1
    )
    assert "not empty, and not made by `archipel up`" in err


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_is_left_behind(folder: Path, sign: signal.Signals) -> None:
    started = up(folder, "--devices", "2", "--rounds", "1000")
    assert started.stdout is not None
    below: list[psutil.Process] = []
    for line in started.stdout:
        if line.startswith(b"round 2 "):
            below = psutil.Process(started.pid).children(recursive=True)
            started.send_signal(sign)
            break
    started.stdout.close()
    started.wait(timeout=30)
    assert len(below) >= 5
    _, alive = psutil.wait_procs(below, timeout=15)
    assert alive == []


def test_the_next_commands_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "mine & yours"
    (folder / "keys").mkdir(parents=True)
    save_public_key(generate_key(), folder / "keys/publisher.pub")
    (folder / "held-out.npz").touch()
    console = Console(file=io.StringIO(), width=20)
    print_next(folder, console)
    assert isinstance(console.file, io.StringIO)
    commands = [shlex.split(line) for line in console.file.getvalue().splitlines() if line.startswith("  archipel ")]
    assert [words[1] for words in commands] == ["export", "run", "inspect", "up", "serve", "device"]
    key, bundle = str(folder / "keys/publisher.pub"), str(folder / "model.bundle")
    assert commands[0][2:] == [
        bundle,
        "--key",
        key,
        "--weights",
        str(folder / "weights.safetensors"),
        "-o",
        "trained.onnx",
    ]
    assert commands[1][-3:] == ["--input", str(folder / "held-out.npz"), "--evaluate"]
    assert commands[1][commands[1].index("--weights") + 1] == str(folder / "weights.safetensors")
    assert commands[3][2:] == ["--folder", str(folder), "--stay"]
    assert commands[4][-1] == str(folder / "server")
    assert commands[5][-1] == str(folder / "devices/1/device.toml")


def test_rounds_without_metrics_have_no_curves(tmp_path: Path) -> None:
    """As those of dpsgd, whose devices report nothing that has no noise."""
    made = RoundMetrics(
        round_id="a" * 32, number=1, devices=8, weight_sum=8.0, step_norm=0.1, step_scale=1.0, clip=None,
        weights_out="b" * 64, result=None, metrics={}, distributions={}, evaluation=None, evaluation_state=None,
        weights_deleted=None, started=0.0, ended=2.5,
    )  # fmt: skip
    assert round_line(made, 3) == "round 1 of 3: 8 devices, 2.5 s"
    console = Console(file=io.StringIO(), width=200)
    finish(tmp_path, [made], console)
    assert isinstance(console.file, io.StringIO)
    assert "no curves: devices of this strategy report no metrics" in console.file.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["rounds.csv"]
