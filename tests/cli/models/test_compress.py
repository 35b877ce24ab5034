from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import click
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from archipel.compression.recipe import PARTS, kind_of

Command = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that tell four clouds of points apart, by weights set by hand, and data in files."""
    folder = tmp_path_factory.mktemp("blobs")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((4, 32)).astype(np.float32)
    w1 = np.concatenate([centres, -centres, rng.standard_normal((56, 32)).astype(np.float32)])
    w2 = np.zeros((4, 64), np.float32)
    w2[:, :4], w2[:, 4:8] = np.eye(4), -np.eye(4)
    w2[:, 8:] = 0.001 * rng.standard_normal((4, 56))
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="first", transB=1),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "w2", "b2"], ["y"], name="second", transB=1),
    ]
    weights = {"w1": w1, "b1": np.zeros(64, np.float32), "w2": w2, "b2": np.zeros(4, np.float32)}
    graph = helper.make_graph(
        nodes, "blobs",
        [helper.make_tensor_value_info("x", 1, ["batch", 32])], [helper.make_tensor_value_info("y", 1, ["batch", 4])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "m.onnx")
    label = rng.integers(0, 4, 256)
    x = centres[label] + 0.3 * rng.standard_normal((256, 32)).astype(np.float32)
    np.savez(folder / "data.npz", x=x.astype(np.float32), label=label)
    np.save(folder / "x.npy", x.astype(np.float32))
    (folder / "recipe.toml").write_text('[[part]]\nkind = "fine_tune"\nsteps = 5\n[[part]]\nkind = "static_int8"\n')
    return folder


def accuracy(model: Path, data: Path) -> float:
    with np.load(data) as file:
        arrays = dict(file)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return float((session.run(None, {"x": arrays["x"]})[0].argmax(1) == arrays["label"]).mean())


class Outside(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs
                       if name in ("src", "href", "xlink:href") and not str(value).startswith("#")]  # fmt: skip
        self.found += [tag] * (tag in ("script", "link", "iframe"))


def check_page(path: Path) -> str:
    text = path.read_text()
    page = Outside()
    page.feed(text)
    assert page.found == []
    assert "<svg" in text
    return text


@pytest.mark.sampled(every=4)
def test_without_a_recipe_it_is_int8_and_says_so(archipel: Command, blobs: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.onnx"
    out, err = archipel("compress", str(blobs / "m.onnx"), "-o", str(small), "--calibration", str(blobs / "x.npy"),
                        "--validation", str(blobs / "data.npz"), "--report", str(tmp_path / "r.html"))  # fmt: skip
    assert "static_int8" in err
    assert f"written to {small}" in out
    assert f"{small.stat().st_size:,}" in out
    shown = re.search(r"^StaticInt8.* ([\d.]+) %", out, re.M)
    assert shown is not None
    assert float(shown.group(1)) == pytest.approx(100 * accuracy(small, blobs / "data.npz"), abs=0.006)
    assert small.stat().st_size < 0.6 * (blobs / "m.onnx").stat().st_size
    page = check_page(tmp_path / "r.html")
    assert "StaticInt8" in page
    assert f"{small.stat().st_size:,}" in page


@pytest.mark.sampled(every=4)
def test_a_recipe_its_json_and_the_trainable_graph(archipel: Command, blobs: Path, tmp_path: Path) -> None:
    out, _ = archipel("compress", str(blobs / "m.onnx"), "-o", str(tmp_path / "small.onnx"), "--recipe",
                      str(blobs / "recipe.toml"), "--data", str(blobs / "data.npz"), "--validation",
                      str(blobs / "data.npz"), "--trainable", str(tmp_path / "t.onnx"), "--json",
                      "--engine", "torch:cpu")  # fmt: skip
    report = json.loads(out)
    assert [step["part"].partition("(")[0] for step in report["steps"]] == ["FineTune", "StaticInt8"]
    assert report["steps"][1]["after"]["accuracy"] == pytest.approx(
        accuracy(tmp_path / "small.onnx", blobs / "data.npz")
    )
    held = {tensor.name: tensor for tensor in onnx.load(tmp_path / "t.onnx").graph.initializer}
    assert held["w1"].data_type == onnx.TensorProto.FLOAT


def test_list_shows_every_part_and_field(archipel: Command) -> None:
    out, _ = archipel("compress", "--list")
    blocks = dict(block.split("\n", 1) for block in out.strip().split("\n\n"))
    assert list(blocks) == [kind_of(part) for part in PARTS]
    for part in PARTS:
        lines = blocks[kind_of(part)].splitlines()
        assert len(lines[0].strip()) > 15
        assert [line.split()[0] for line in lines[1:]] == [field.name for field in dataclasses.fields(part)]
    assert re.search(r"^    batch_size +32 +int$", blocks["fine_tune"], re.M)


@pytest.mark.sampled(every=4)
def test_a_target(archipel: Command, blobs: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.onnx"
    arguments = ["compress", str(blobs / "m.onnx"), "-o", str(small), "--calibration", str(blobs / "x.npy"),
                 "--validation", str(blobs / "data.npz"), "--trials", "1"]  # fmt: skip
    out, _ = archipel(*arguments, "--target", "size<60%, accuracy>=-1", "--report", str(tmp_path / "r.html"))
    assert "point 1 meets size<60%, accuracy>=-1" in out
    assert small.read_bytes() == (tmp_path / "small.onnx.search/points/001/model.onnx").read_bytes()
    page = check_page(tmp_path / "r.html")
    assert "size&lt;60%, accuracy&gt;=-1" in page
    small.unlink()
    _, err = archipel(*arguments, "--target", "size<1%", code=1)
    assert "no point meets size<1%; the nearest is point 1, which misses size<1%" in err
    assert not small.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "size<3", "--validation", "data.npz"], "expected a unit of size"),
        (["--target", "size<3kB"], "--target needs --validation"),
        (["--target", "size<3kB", "--recipe", "recipe.toml"], "give one of them"),
        (["--minutes", "3"], "--minutes is for a search"),
        (["--engine", "jax", "--recipe", "recipe.toml", "--data", "data.npz"], "choose from onnxruntime, torch"),
        (["--report", "nosuch/r.html"], "nosuch/r.html: there is no folder"),
        (["--report", "."], "is a folder; give the name of a file"),
        (["--recipe", "none.toml"], "none.toml: no such file"),
        (["--recipe", "recipe.toml"], "FineTune needs training data"),
        (["--validation", "x.npy"], "validation: no labels"),
    ],
)
def test_mistakes(arguments: list[str], words: str, archipel: Command, blobs: Path, monkeypatch: pytest.MonkeyPatch,
                  tmp_path: Path) -> None:  # fmt: skip
    monkeypatch.chdir(blobs)
    _, err = archipel("compress", "m.onnx", "-o", str(tmp_path / "small.onnx"), *arguments, code=1)
    assert words in err
    assert not (tmp_path / "small.onnx").exists()


@pytest.mark.sampled(every=8)
def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(archipel: Command, blobs: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "long.toml"
    recipe.write_text('[[part]]\nkind = "fine_tune"\nsteps = 900\nbatch_size = 8\n')
    arguments = ["compress", str(blobs / "m.onnx"), "-o", str(tmp_path / "a.onnx"), "--recipe", str(recipe), "--data",
                 str(blobs / "data.npz"), "--work", str(tmp_path / "work")]  # fmt: skip
    # It stops itself at the 300th step, as a terminal would stop it.
    code = (
        "import os, signal; from archipel.compression import training; step = training.StepRunner.step; n = [0]\n"
        "def counted(*a):\n n[0] += 1\n if n[0] == 300: os.kill(os.getpid(), signal.SIGINT)\n return step(*a)\n"
        "training.StepRunner.step = counted\nfrom archipel.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert "run the same command again" in done.stderr
    assert not (tmp_path / "a.onnx").exists()
    [checkpoint] = (tmp_path / "work").glob("training-*.npz")
    with np.load(checkpoint) as saved:
        assert 299 <= len(saved["archipel/losses"]) <= 301
    archipel(*arguments)
    archipel(*arguments[:3], str(tmp_path / "b.onnx"), *arguments[4:-2])
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_signals_are_put_back(archipel: Command, blobs: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    archipel("compress", str(blobs / "m.onnx"), "-o", str(tmp_path / "s.onnx"), "--calibration", str(blobs / "x.npy"))
    assert signal.getsignal(signal.SIGINT) is before


def test_help_is_readable() -> None:
    from archipel.cli.models.compress import compress_command

    text = compress_command.get_help(click.Context(compress_command, info_name="compress"))
    assert "--target" in text
    assert max(map(len, text.splitlines())) <= 120
