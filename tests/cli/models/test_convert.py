from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from archipel import bundle as b
from archipel.lite_runtime import load
from tests.support.voice_activity import voice_activity

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A linear model of 3 classes, data, a recipe and a publisher's key."""
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((3, 8)).astype(np.float32), "b": np.zeros(3, np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="head", transB=1)], "linear",
        [helper.make_tensor_value_info("x", 1, ["batch", 8])], [helper.make_tensor_value_info("y", 1, ["batch", 3])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    x = rng.standard_normal((64, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, label=(x @ weights["w"].T).argmax(1))
    (tmp_path / "recipe.toml").write_text('[[part]]\nkind = "static_int8"\n')
    key = b.generate_key()
    b.save_private_key(key, tmp_path / "key")
    b.save_public_key(key, tmp_path / "key.pub")
    return tmp_path


def opened(folder: Path, name: str = "m.bundle") -> b.Bundle:
    return b.open_bundle(folder / name, [b.load_public_key(folder / "key.pub")], cache=folder / "cache")


def call(archipel: Command, folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    return archipel("convert", str(folder / "m.onnx"), "-o", str(folder / "m.bundle"), "--key", str(folder / "key"),
                    *arguments, code=code)  # fmt: skip


def test_without_a_loss_it_predicts(archipel: Command, folder: Path) -> None:
    out, _ = call(archipel, folder, "--name", "rain")
    assert "\nself-test: predict on 4 examples of pseudo-random numbers\n" in out
    bundle = opened(folder)
    assert set(bundle.manifest.programs) == {"predict"}
    assert bundle.manifest.name == "rain"
    assert bundle.digest in out
    assert "predicts only" in out
    with np.load(folder / "data.npz") as file:
        data = dict(file)
    runtime = load(folder / "m.bundle", [b.load_public_key(folder / "key.pub")], cache=folder / "cache")
    assert (runtime.predict(data["x"]).argmax(1) == data["label"]).all()


def test_with_a_loss_devices_train_what_was_named(archipel: Command, folder: Path) -> None:
    out, _ = call(archipel, folder, "--loss", "cross_entropy", "--optimizer", "adam", "--lr", "0.003", "--trainable",
                  "b", "--strategy", "fedprox", "--epochs", "3", "--batch-size", "4")  # fmt: skip
    manifest = opened(folder).manifest
    assert {"predict", "train", "evaluate", "finish"} <= set(manifest.programs)
    assert "predicts only" not in out
    train = manifest.programs["train"]
    assert [port.name for port in train.inputs if type(port).__name__ == "Parameter"] == ["b"]
    assert {port.name: port.default for port in train.inputs if type(port).__name__ == "Hyperparameter"}["lr"] == 0.003
    assert manifest.strategy == "fedprox"
    [phase] = manifest.schedule
    assert (phase.epochs, phase.batch_size) == (3, 4)


def test_a_recipe_is_applied_and_kept_as_lineage(archipel: Command, folder: Path) -> None:
    out, _ = call(archipel, folder, "--recipe", str(folder / "recipe.toml"), "--data", str(folder / "data.npz"),
                  "--validation", str(folder / "data.npz"), "--loss", "cross_entropy")  # fmt: skip
    bundle = opened(folder)
    assert "predict: " in out
    assert "static_int8" in bundle.manifest.lineage.recipe[0]
    assert bundle.manifest.lineage.metrics["accuracy_before"] == 1.0
    operators = {
        node.op_type for node in onnx.load(bundle.folder / "predict.onnx", load_external_data=False).graph.node
    }
    assert "QuantizeLinear" in operators
    for name in ("calibration", "validation"):
        assert f"predict and training form on the {name} examples: 100.0% equal classes, signal to noise " in out


@pytest.mark.sampled(every=4)
def test_calibration_unlike_the_data_is_refused(archipel: Command, folder: Path) -> None:
    with np.load(folder / "data.npz") as data:
        np.save(folder / "faint.npy", data["x"] * np.float32(1e-3))
    arguments = ["--recipe", str(folder / "recipe.toml"), "--calibration", str(folder / "faint.npy"),
                 "--validation", str(folder / "data.npz"), "--loss", "cross_entropy"]  # fmt: skip
    _, err = call(archipel, folder, *arguments, code=1)
    assert "--validation: predict, as devices run it, gives" in err
    assert "or lower --min-agreement" in err
    assert not (folder / "m.bundle").exists()
    out, _ = call(archipel, folder, *arguments, "--min-agreement", "0.1")
    metrics = opened(folder).manifest.lineage.metrics
    assert 0.1 < metrics["agreement_validation"] < 0.8
    assert f"on the validation examples: {metrics['agreement_validation']:.1%} equal classes" in out


def test_calibration_alone_means_int8(archipel: Command, folder: Path) -> None:
    _, err = call(archipel, folder, "--calibration", str(folder / "data.npz"))
    assert "no --recipe: static_int8 with its defaults" in err
    assert "static_int8" in opened(folder).manifest.lineage.recipe[0]


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--data", "data.npz"], "give --recipe, or --calibration for int8", 1),
        (["--optimizer", "adam", "--momentum", "0.9", "--loss", "mse"], "--momentum: adam has none", 1),
        (["--loss", "hinge"], "'hinge' is not one of", 2),
        (["--strategy", "fedmagic"], "'fedmagic' is not one of", 2),
        (["--loss", "cross_entropy", "--trainable", "ghost.*"], "ghost.*", 1),
        (["--loss", "cross_entropy", "--strategy", "fedrep"], "needs --strategy-option personal=VALUE", 1),
        (["--population", "two words"], "expected names of 1 to 128 letters", 1),
    ],
)
def test_mistakes(arguments: list[str], words: str, code: int, archipel: Command, folder: Path) -> None:
    _, err = call(archipel, folder, *arguments, code=code)
    assert words in err
    assert not (folder / "m.bundle").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "StaticInt8 needs calibration data"),
        (["--data", "data.npz", "--name", "a\nb"], "name: expected 1 to 256 printable characters"),
        (["--data", "data.npz", "--loss", "cross_entropy", "--trainable", "ghost"], "no parameter matches 'ghost'"),
    ],
)
def test_it_is_told_before_anything_is_compressed(
    arguments: list[str], words: str, archipel: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    _, err = call(archipel, folder, "--recipe", "recipe.toml", "--work", "run", *arguments, code=1)
    assert words in err
    assert not (folder / "run").exists()  # where compression would have kept what it did


@pytest.mark.sampled(every=3)
def test_notes_say_what_was_done(archipel: Command, folder: Path) -> None:
    out, _ = call(archipel, folder, "--loss", "cross_entropy", "--trainable", "b", "--strategy-option", "clip=2")
    notes = [line.removeprefix("note: ") for line in out.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith("read from ONNX, opset 21; on 3 samples its answers ")
    assert notes[1:] == [
        "devices train 1 of the model's 2 tensors (3 of 27 numbers)",
        "update: clipped to a norm of 2 in every round",
        "rounding: an element of an update is at most 2, in 16 bits",
        "weighting: by examples; a device with 100 or more weighs 1 (weight_cap)",
        "rounds report: update/clipped (up to 1), update/capped (up to 1), loss (up to 64), accuracy (up to 1)",
    ]
    (folder / "m.bundle").rename(folder / "first.bundle")
    facts = json.loads(call(archipel, folder, "--loss", "cross_entropy", "--trainable", "b", "--strategy-option",
                            "clip=2", "--json")[0])  # fmt: skip
    assert facts["notes"] == notes
    assert facts["programs"] == ["evaluate", "finish", "predict", "refresh", "train", "train_8"]
    assert (facts["digest"], facts["trains"]) == (opened(folder).digest, True)
    shown, _ = archipel("inspect", str(folder / "m.bundle"), "--key", str(folder / "key.pub"))
    assert f"note: {notes[0]}" in shown
    assert f"note: {notes[1]}" in shown


def test_a_source_cannot_write_lines_of_its_own(archipel: Command, folder: Path) -> None:
    model = onnx.load(folder / "m.onnx")
    model.producer_name = "tool\nnote: verified by everybody\x1b[2J"
    onnx.save(model, folder / "m.onnx")
    out, _ = call(archipel, folder)
    assert "note: read from ONNX (tool note: verified by everybody [2J), opset 21" in out
    assert not any(line.startswith("note: verified") for line in out.splitlines())
    assert "\x1b" not in out


def test_an_output_that_exists_stays(archipel: Command, folder: Path) -> None:
    (folder / "m.bundle").write_text("precious")
    _, err = call(archipel, folder, code=1)
    assert "exists already" in err
    assert (folder / "m.bundle").read_text() == "precious"


def test_a_source_that_is_no_model(archipel: Command, folder: Path) -> None:
    (folder / "m.onnx").write_bytes(b"no model")
    _, err = call(archipel, folder, code=1)
    assert "m.onnx" in err
    assert "Traceback" not in err


@pytest.mark.sampled(every=4)
def test_inputs_and_sizes_are_fixed_and_loops_limited(archipel: Command, folder: Path) -> None:
    onnx.save(voice_activity(), folder / "m.onnx")
    _, error = call(archipel, folder, "--loss", "mse", code=1)
    assert "give it one value with --fix rate=NUMBER" in error
    _, error = call(archipel, folder, "--loss", "mse", "--fix", "rate=16000", code=1)
    assert "as --fix state=0 does" in error
    out, _ = call(archipel, folder, "--fix", "rate=16000", "--fix", "state=0", "--fix", "samples=20", "--loss", "mse",
                  "--limit-loops", "8")  # fmt: skip
    assert "fixed: input 'rate', input 'state', size 'samples' (20)" in out
    manifest = opened(folder).manifest
    assert [port.name for port in manifest.programs["predict"].inputs if type(port).__name__ == "Example"] == ["sound"]
    assert "train" in manifest.programs
    for wrong, message in (
        ("rate", "give NAME=NUMBER"),
        ("rate=fast", "give NAME=NUMBER"),
        ("samples=2.5", "a size is a whole number"),
        ("pace=3", "no input has a free size 'pace'"),
    ):
        _, error = archipel("convert", str(folder / "m.onnx"), "-o", str(folder / "n"), "--key", str(folder / "key"),
                            "--fix", wrong, code=1)  # fmt: skip
        assert message in error
