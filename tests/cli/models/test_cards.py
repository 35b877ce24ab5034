"""A model card from TOML to a bundle, through compression, a release and an exported file, to the next bundle."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec.structs import replace
from onnx import helper, numpy_helper

from archipel import bundle as b
from archipel.graph.model_card import CARD_KEY
from tests.support.commands import Command

CARD = """name = "rain"
description = "Tells rain from eight numbers."
task = "classification"
contact = "someone@example.org"
[[data]]
name = "drawn numbers"
examples = 64
[[metrics]]
name = "accuracy"
value = 0.9375
data = "drawn numbers, held out"
examples = 16
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A linear model of 27 parameters, calibration data, a card and a publisher's key."""
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((3, 8)).astype(np.float32), "b": np.zeros(3, np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="head", transB=1)], "linear",
        [helper.make_tensor_value_info("x", 1, ["batch", 8])], [helper.make_tensor_value_info("y", 1, ["batch", 3])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", rng.standard_normal((64, 8)).astype(np.float32))
    (tmp_path / "card.toml").write_text(CARD)
    key = b.generate_key()
    b.save_private_key(key, tmp_path / "key")
    b.save_public_key(key, tmp_path / "key.pub")
    return tmp_path


def convert(archipel: Command, folder: Path, source: str, output: str, *arguments: str, code: int = 0) -> str:
    return archipel("convert", str(folder / source), "-o", str(folder / output), "--key", str(folder / "key"),
                    *arguments, code=code)[code and 1]  # fmt: skip


def card(folder: Path, name: str) -> b.ModelCard | None:
    return b.open_bundle(folder / name, [b.load_public_key(folder / "key.pub")], folder / "cache").card


@pytest.mark.sampled(every=4)
def test_a_card_goes_where_the_model_goes(archipel: Command, folder: Path) -> None:
    said = convert(archipel, folder, "m.onnx", "a.bundle", "--loss", "cross_entropy", "--card",
                   str(folder / "card.toml"))  # fmt: skip
    assert "\ncard: rain\n" in said
    first = card(folder, "a.bundle")
    assert first is not None
    assert (first.name, first.parameters, first.metrics[0].value) == ("rain", 27, 0.9375)
    # No graph repeats it.
    with zipfile.ZipFile(folder / "a.bundle") as archive:
        for name in archive.namelist():
            assert name == "card.json" or CARD_KEY.encode() not in archive.read(name), name
    key = ("--key", str(folder / "key.pub"))
    archipel("export", str(folder / "a.bundle"), *key, "-o", str(folder / "e.onnx"))
    assert "card: rain, classification" in archipel("inspect", str(folder / "e.onnx"))[0]
    (folder / "r.toml").write_text('[[part]]\nkind = "static_int8"\n')
    archipel("compress", str(folder / "e.onnx"), "-o", str(folder / "c.onnx"), "--recipe", str(folder / "r.toml"),
             "--calibration", str(folder / "x.npy"))  # fmt: skip
    # What was measured before the compression does not pass for a measurement of the small model.
    smaller = replace(first, metrics=(replace(first.metrics[0], data="drawn numbers, held out, before compression"),))
    for source, expected in (("e.onnx", first), ("a.bundle", first), ("c.onnx", smaller)):
        convert(archipel, folder, source, f"{source}-again.bundle")
        assert card(folder, f"{source}-again.bundle") == expected, source
    convert(archipel, folder, "e.onnx", "release", "--variants", "float,int8", "--calibration", str(folder / "x.npy"))
    for variant, expected in (("float", first), ("int8", smaller)):
        assert card(folder, f"release/{variant}.bundle") == expected


def test_inspect_and_verify_show_it(archipel: Command, folder: Path) -> None:
    convert(archipel, folder, "m.onnx", "a.bundle", "--card", str(folder / "card.toml"))
    convert(archipel, folder, "m.onnx", "bare.bundle")
    key = ("--key", str(folder / "key.pub"))
    text, _ = archipel("inspect", str(folder / "a.bundle"), *key)
    for line in ("card: rain, classification", "  Tells rain from eight numbers.", "  contact: someone@example.org",
                 "  parameters: 27", "  training data: drawn numbers; 64 examples",
                 "  measured: accuracy 0.9375 on 16 examples of drawn numbers, held out"):  # fmt: skip
        assert f"\n{line}\n" in text
    facts = json.loads(archipel("inspect", str(folder / "a.bundle"), *key, "--json")[0])
    assert facts["card"]["metrics"][0]["value"] == 0.9375
    assert json.loads(archipel("inspect", str(folder / "bare.bundle"), *key, "--json")[0])["card"] is None
    assert "ok       card: rain" in archipel("verify", str(folder / "a.bundle"), *key)[0]
    assert "card" not in archipel("verify", str(folder / "bare.bundle"), *key)[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CARD + "licence = 3", r"card.toml: card: Object contains unknown field `licence` - at `$.metrics[0]`"),
        ("name =", "card.toml: card: Invalid value"),
        (CARD.replace("rain", "r\\u001b[2J", 1), "card.toml: card: name has U+001B"),
    ],
)
def test_a_wrong_card_is_named_before_any_work(archipel: Command, folder: Path, text: str, message: str) -> None:
    (folder / "card.toml").write_text(text)
    assert message in convert(archipel, folder, "m.onnx", "a.bundle", "--card", str(folder / "card.toml"), code=1)
    assert not (folder / "a.bundle").exists()


def test_anybodys_metadata_is_no_card(archipel: Command, folder: Path) -> None:
    """An ONNX file may have anything under the card's key: what is no card is left out."""
    model = onnx.load(folder / "m.onnx")
    helper.set_model_props(model, {CARD_KEY: '{"name":"\\u001b[2J","description":"x","task":"x"}'})
    onnx.save(model, folder / "m.onnx")
    convert(archipel, folder, "m.onnx", "a.bundle")
    assert card(folder, "a.bundle") is None
    assert "\x1b" not in archipel("inspect", str(folder / "m.onnx"))[0]
