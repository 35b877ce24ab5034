"""`archipel compare` on ONNX files and bundles, figures by NumPy."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser

from archipel import bundle as b
from tests.support.commands import Command, Linear

MLP = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] y) <float[4, 5] w, float[5, 3] v>
{ h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"""


class Pair(NamedTuple):
    """Two ONNX files, their first weights, the second one of both, and data with labels."""

    a: Path
    b: Path
    w: tuple[np.ndarray, np.ndarray]
    v: np.ndarray
    x: np.ndarray
    label: np.ndarray
    data: Path


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    rng = np.random.default_rng(7)
    w, v, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 5), (5, 3), (40, 4)))
    other = (w + 0.5 * rng.standard_normal(w.shape)).astype(np.float32)
    for name, weight in (("a", w), ("b", other)):
        proto = parser.parse_model(MLP)
        proto.graph.initializer.extend([numpy_helper.from_array(weight, "w"), numpy_helper.from_array(v, "v")])
        (tmp_path / f"{name}.onnx").write_bytes(proto.SerializeToString())
    label = rng.integers(0, 3, 40)
    np.savez(tmp_path / "data.npz", x=x, label=label)
    return Pair(tmp_path / "a.onnx", tmp_path / "b.onnx", (w, other), v, x, label, tmp_path / "data.npz")


def snr(a: np.ndarray, b: np.ndarray) -> float:
    return 10 * math.log10(np.square(a, dtype=np.float64).sum() / np.square(a - b, dtype=np.float64).sum())


def call(archipel: Command, pair: Pair, *more: str, code: int = 0) -> tuple[str, str]:
    found: tuple[str, str] = archipel("compare", str(pair.a), str(pair.b), "--data", str(pair.data), *more, code=code)
    return found


def test_as_json(archipel: Command, pair: Pair) -> None:
    result = json.loads(call(archipel, pair, "--json", "--rows", "10")[0])
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["y", "h", "r"]
    h, h2 = (pair.x @ w for w in pair.w)
    outputs = h.clip(0) @ pair.v, h2.clip(0) @ pair.v
    assert rows["y"]["snr_db"] == pytest.approx(snr(*outputs), abs=1e-3)
    assert rows["h"]["snr_db"] == pytest.approx(snr(h[:10], h2[:10]), abs=1e-3)
    cosine = np.vdot(h[:10], h2[:10]) / np.linalg.norm(h[:10]) / np.linalg.norm(h2[:10])
    assert rows["h"]["cosine"] == pytest.approx(cosine, abs=1e-6)
    assert result["first_divergence"]["layer"] == "MatMul w"
    best = [output.argmax(axis=1) for output in outputs]
    assert result["agreement"] == (best[0] == best[1]).mean()
    assert result["accuracy"]["a"] == (best[0] == pair.label).mean()
    assert result["accuracy"]["b"] == (best[1] == pair.label).mean()
    assert (result["examples"], result["compared"]) == (40, 10)


def test_as_text(archipel: Command, pair: Pair) -> None:
    out, _ = call(archipel, pair)
    assert "b.onnx against a.onnx: 40 examples, inner values on 40" in out
    assert re.search(r"^ +[\d.-]+ +0\.\d{6} +\S+  output y +MatMul v$", out, re.M)
    assert re.search(r"^ +[\d.-]+ +0\.\d{6} +\S+  r +MatMul w \+ Relu$", out, re.M)
    assert re.search(r"^first to diverge \(below 20 dB\): MatMul w, value h, [\d.-]+ dB$", out, re.M)
    assert re.search(
        r"^accuracy: [\d.]+% -> [\d.]+%, [+-][\d.]+ points, 95% interval \[.*Agresti and Min 2005", out, re.M
    )
    out, _ = call(archipel, pair, "--layers", "1", "--threshold", "-30")
    assert "... and 1 more values" in out
    assert "nothing diverges: no value is below -30 dB" in out


def test_the_outputs_recover_from_layers_that_are_rescaled(archipel: Command, pair: Pair) -> None:
    """As equalisation does: w times 4, v through 4."""
    proto = parser.parse_model(MLP)
    proto.graph.initializer.extend(
        [numpy_helper.from_array(pair.w[0] * np.float32(4), "w"), numpy_helper.from_array(pair.v / np.float32(4), "v")]
    )
    pair.b.write_bytes(proto.SerializeToString())
    out, _ = call(archipel, pair)
    assert "first to diverge (below 20 dB): MatMul w" in out
    assert "the outputs do not: a recipe rescaled that layer" in out


@pytest.mark.sampled(every=3)
def test_the_page_is_one_file(archipel: Command, pair: Pair, tmp_path: Path) -> None:
    out, _ = call(archipel, pair, "--html", str(tmp_path / "page.html"))
    assert out.endswith(f"written to {tmp_path / 'page.html'}\n")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "MatMul w + Relu" in page
    assert "first to diverge" in page
    for outside in ("src=", "<link", "@import", "<script"):
        assert outside not in page
    # Anchors of the drawing point into it.
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    again = tmp_path / "again.html"
    call(archipel, pair, "--html", str(again))
    assert again.read_text() == page


def test_names_are_text_in_the_page(archipel: Command, pair: Pair, tmp_path: Path) -> None:
    for path in (pair.a, pair.b):
        path.write_bytes(path.read_bytes().replace(b"\x01h", b"\x01<"))
    call(archipel, pair, "--html", str(tmp_path / "page.html"))
    assert "<td>&lt;</td>" in (tmp_path / "page.html").read_text()


def test_a_bundle_against_a_file(archipel: Command, linear: Linear, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, label = rng.standard_normal((30, 4)).astype(np.float32), rng.integers(0, 3, 30)
    np.savez(tmp_path / "data.npz", x=x, label=label)
    w = (linear.w + 0.2 * rng.standard_normal((4, 3))).astype(np.float32)
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w>
    { y = MatMul (x, w) }"""
    proto = parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    (tmp_path / "b.onnx").write_bytes(proto.SerializeToString())
    b.pack(linear.folder, tmp_path / "l.bundle")
    for path in (linear.folder, tmp_path / "l.bundle"):
        out, _ = archipel(
            "compare", str(path), str(tmp_path / "b.onnx"), *linear.arguments[1:], "--data", str(tmp_path / "data.npz"),
            "--json",
        )  # fmt: skip
        result = json.loads(out)
        assert [row["name"] for row in result["rows"]] == ["y"]
        assert result["rows"][0]["snr_db"] == pytest.approx(snr(x @ linear.w, x @ w), abs=1e-3)
        assert result["accuracy"]["b"] == ((x @ w).argmax(axis=1) == label).mean()


def test_one_array_is_the_only_input(archipel: Command, pair: Pair, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", pair.x)
    out, _ = archipel("compare", str(pair.a), str(pair.a), "--data", str(tmp_path / "x.npy"))
    assert "nothing diverges" in out
    assert "accuracy" not in out
    np.savez(tmp_path / "other.npz", image=pair.x, label=pair.label)
    out, _ = archipel("compare", str(pair.a), str(pair.a), "--data", str(tmp_path / "other.npz"))
    assert "accuracy" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{a}", "none.onnx", "--data", "{data}"], "none.onnx: no such file"),
        (["{a}", "{b}", "--data", "none.npz"], "none.npz: No such file"),
        (["{a}", "{folder}", "--data", "{data}"], "give --key FILE.pub"),
        (["{a}", "{b}", "--data", "{wide}"], "wide.npy: data: input 'x' has the shape"),
        (["{a}", "{b}", "--data", "{two}"], "no entry 'x', which is an input; it has p, q"),
        (["{a}", "{text}", "--data", "{data}"], "text.onnx: not a valid ONNX file"),
        (["{a}", "{b}", "--data", "{data}", "--threshold", "nan"], "--threshold nan: expected a number of dB"),
    ],
)
def test_mistakes_are_one_line(
    archipel: Command, pair: Pair, linear: Linear, tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    np.save(tmp_path / "wide.npy", np.zeros((3, 9), np.float32))
    np.savez(tmp_path / "two.npz", p=pair.x, q=pair.x)
    places = {"a": pair.a, "b": pair.b, "data": pair.data, "folder": linear.folder, "text": tmp_path / "text.onnx",
              "wide": tmp_path / "wide.npy", "two": tmp_path / "two.npz"}  # fmt: skip
    _, err = archipel("compare", *(each.format(**places) for each in arguments), code=1)
    assert text in err
    assert err.count("\n") == 1


def test_long_names_do_not_run_into_the_next_column(archipel: Command, tmp_path: Path) -> None:
    long = "model/encoder/layers/11/attention/output/dense/MatMul:0"
    proto = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y) {}')
    proto.graph.node.append(helper.make_node("Relu", ["x"], [long], name="relu"))
    proto.graph.output[0].name = long
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    np.save(tmp_path / "x.npy", np.ones((8, 4), np.float32))
    out, _ = archipel("compare", str(tmp_path / "m.onnx"), str(tmp_path / "m.onnx"), "--data", str(tmp_path / "x.npy"))
    head, row = (next(line for line in out.splitlines() if word in line) for word in ("computed by", long))
    assert row[head.index("computed by") :] == "Relu relu"
    assert row[head.index("value") :].startswith(f"output {long}  ")
