"""A full disk: each command names the file or folder that it was asked for and the remedy, and leaves no half file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.durable.runs import tree
from tests.support.commands import Command
from tests.support.development import place_development_key
from tests.support.small_disk import small_disk, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

FULL = "No space left on device; free some space and run again"
TRAINING = """
[model]
onnx = "{network}"

[data]
train = "{data}"

[train]
loss = "cross_entropy"
optimizer = {{ name = "sgd", lr = 0.1 }}
epochs = 1
threads = 1

[output]
folder = "{folder}"
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file of 20 KiB, five pages."""
    weights = np.random.default_rng(0).standard_normal((100, 50)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "network",
        [helper.make_tensor_value_info("x", 1, ["batch", 100])],
        [helper.make_tensor_value_info("y", 1, ["batch", 50])], [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    file = tmp_path_factory.mktemp("network") / "network.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), file)
    return file


def check_error(error: str, asked: Path) -> None:
    """The last line names what was asked for, or a file in it for which there was no room, and the remedy."""
    last = error.splitlines()[-1]
    assert str(asked) in last, error
    assert FULL in last, error
    # Temporary names begin with a dot.
    assert "/." not in last, error


@pytest.mark.parametrize(("pages", "files"), [(1, 0), (3, 0), (64, 1), (64, 3)])
def test_a_new_folder(archipel: Command, tmp_path: Path, pages: int, files: int) -> None:
    with small_disk(tmp_path / "disk", pages, files) as disk:
        check_error(archipel("new", str(disk / "digits"), code=1)[1], disk / "digits")
        assert tree(disk) == {}


@pytest.mark.parametrize(("name", "more"), [("m", ()), ("m.bundle", ()), ("m", ("--variants", "float"))])
def test_a_bundle(
    archipel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Path, name: str, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    key = place_development_key(tmp_path / "config")
    # No room for the first file or the last, or beside the bundle for the packed one; for a folder, or a file in it.
    packed = 14 if name.endswith(".bundle") or more else 8
    for number, (pages, files) in enumerate([(1, 0), (packed, 0), (64, 1), (64, 3)]):
        with small_disk(tmp_path / f"disk-{number}", pages, files) as disk:
            error = archipel("convert", str(network), "-o", str(disk / name), "--key", str(key), *more, code=1)[1]
            check_error(error, disk / name)
            assert tree(disk) == {}


def test_a_page(archipel: Command, tmp_path: Path, network: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        asked = disk / "page.html"
        check_error(archipel("insight", str(network), "-o", str(asked), "--no-times", code=1)[1], asked)
        assert tree(disk) == {}


@pytest.mark.sampled(every=3)
def test_a_training(archipel: Command, tmp_path: Path, network: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((64, 100), np.float32), label=np.zeros(64, np.int64))
    job = tmp_path / "job.toml"
    # The checkpoint has 15 pages, the rest 5 pages at most; of each there is all or nothing.
    files = ["checkpoint/last.pt", "state.pt", "metrics.json", "model.onnx", "curves.png"]
    for count, (pages, limit) in enumerate([(10, 0), (17, 0), (64, 4), (23, 0), (30, 0)]):
        with small_disk(tmp_path / f"disk-{count}", pages, limit) as disk:
            asked = disk / "trained"
            job.write_text(TRAINING.format(network=network, data=tmp_path / "data.npz", folder=asked))
            check_error(archipel("train", str(job), code=1)[1], asked / files[count])
            there = {path.relative_to(asked).as_posix() for path in asked.rglob("*") if path.is_file()}
            assert there == set(files[:count])
