"""`archipel convert --preprocess`: bundles that take raw pictures, and what `archipel inspect` says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from archipel import Model
from archipel import bundle as b
from archipel.lite_runtime import load

Command = Callable[..., tuple[str, str]]

TOML = """
[[preprocess]]
kind = "raw"
dtype = "uint8"
shape = ["batch", 4, 4, 3]

[[preprocess]]
kind = "scale"

[[preprocess]]
kind = "normalize"

[[preprocess]]
kind = "layout"
source = "NHWC"
target = "NCHW"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> agraph (float[batch, 3, 4, 4] image) => (float[batch, 2] y) '
        "{ f = Flatten (image) y = MatMul (f, w) }"
    )
    rng = np.random.default_rng(0)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(48, 2)).astype(np.float32), "w"))
    Model.from_proto(proto).save(tmp_path / "m.onnx")
    (tmp_path / "raw.toml").write_text(TOML)
    np.savez(tmp_path / "data.npz", x=rng.integers(0, 200, (20, 4, 4, 3), dtype=np.uint8), label=np.arange(20) % 2)
    b.save_private_key(key := b.generate_key(), tmp_path / "key")
    b.save_public_key(key, tmp_path / "key.pub")
    return tmp_path


def call(archipel: Command, folder: Path, *arguments: str, source: str = "m.onnx", code: int = 0) -> tuple[str, str]:
    return archipel("convert", str(folder / source), "-o", str(folder / "m.bundle"), "--key", str(folder / "key"),
                    "--preprocess", str(folder / "raw.toml"), *arguments, code=code)  # fmt: skip


@pytest.mark.sampled(every=3)
def test_the_bundle_takes_bytes_and_says_so(archipel: Command, folder: Path) -> None:
    out, _ = call(
        archipel, folder, "--preprocess-data", str(folder / "data.npz"), "--loss", "cross_entropy", "--lr", "0.1"
    )
    told = "prepares raw inputs: raw uint8 [batch, 4, 4, 3] -> scale -> normalize mean=[0.3"
    assert told in out
    runtime = load(folder / "m.bundle", [b.load_public_key(folder / "key.pub")], cache=folder / "cache")
    with np.load(folder / "data.npz") as file:
        x, label = file["x"], file["label"]
    # The answer from the definition, in float64.
    scaled = x.astype(np.float64) / 255
    normal = (scaled - scaled.mean(axis=(0, 1, 2))) / scaled.std(axis=(0, 1, 2))
    weights = Model.from_onnx(folder / "m.onnx").parameters["w"]
    wanted = normal.transpose(0, 3, 1, 2).reshape(20, 48) @ weights
    np.testing.assert_allclose(runtime.predict({"image": x})["y"], wanted, rtol=1e-4, atol=1e-4)
    before = runtime.evaluate({"image": x, "label": label})["loss"]
    runtime.fit({"image": x, "label": label})
    assert runtime.evaluate({"image": x, "label": label})["loss"] < before
    shown, _ = archipel("inspect", str(folder / "m.bundle"), "--key", str(folder / "key.pub"))
    assert f"note: {told}" in shown
    assert "image: uint8[batch, 4, 4, 3]" in shown
    facts, _ = archipel("inspect", str(folder / "m.bundle"), "--key", str(folder / "key.pub"), "--json")
    kinds = [table["kind"] for table in json.loads(facts)["preprocessing"]]
    assert kinds == ["raw", "scale", "normalize", "layout"]
    # A bundle as the source has its transforms, and no second ones go in front of them.
    key, again = str(folder / "key"), str(folder / "n.bundle")
    arguments = ["-o", again, "--key", key, "--preprocess", str(folder / "raw.toml")]
    _, problem = archipel("convert", str(folder / "m.bundle"), *arguments, code=1)
    assert "the model prepares raw inputs already" in problem


def test_a_folder_of_pictures_says_mean_and_deviation(archipel: Command, folder: Path) -> None:
    with np.load(folder / "data.npz") as file:
        for number, (picture, label) in enumerate(zip(file["x"], file["label"])):
            (folder / "pictures" / f"kind{label}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(folder / "pictures" / f"kind{label}" / f"{number}.png")
        mean = file["x"].mean(axis=(0, 1, 2)) / 255
    call(archipel, folder, "--preprocess-data", str(folder / "pictures"))
    shown, _ = archipel("inspect", str(folder / "m.bundle"), "--key", str(folder / "key.pub"), "--json")
    np.testing.assert_allclose(json.loads(shown)["preprocessing"][2]["mean"], mean, rtol=1e-5)


def test_what_is_wrong_is_said(archipel: Command, folder: Path) -> None:
    _, problem = call(archipel, folder, code=1)
    assert "normalize has no mean and std; write them into the file, or give raw examples" in problem
    (folder / "raw.toml").write_text(TOML.replace('"scale"', '"scales"'))
    _, problem = call(archipel, folder, code=1)
    assert "raw.toml: [[preprocess]] 2: kind is one of raw, " in problem
    (folder / "raw.toml").write_text(TOML.replace("4, 4, 3", "5, 4, 3"))
    _, problem = call(archipel, folder, "--preprocess-data", str(folder / "data.npz"), code=1)
    assert "normalize: examples 0 to 19 are uint8[20, 4, 4, 3], expected tensor(uint8) ['batch', 5, 4, 3]" in problem
