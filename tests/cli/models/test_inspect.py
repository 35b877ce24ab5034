"""`archipel inspect` on bundles and plain ONNX, figures by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from archipel.cli.models.inspect_text import _protocols, _until
from tests.support.commands import Command, Linear

MLP = """<ir_version: 8, opset_import: ["": 17], producer_name: "by hand">
g (float[n, 6] x) => (float[n, 3] y) <float[6, 8] w, float[8] b, float[8, 3] v>
{ h = Gemm (x, w, b) r = Relu (h) y = MatMul (r, v) }"""


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    w, v = np.ones((6, 8), np.float32), np.ones((8, 3), np.float32)
    w[:, :2], v[0] = 0, 0  # 12 of 48 and 3 of 24
    proto = parser.parse_model(MLP)
    tensors = {"w": w, "b": np.ones(8, np.float32), "v": v}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    (tmp_path / "mlp.onnx").write_bytes(proto.SerializeToString())
    return tmp_path / "mlp.onnx"


def test_an_onnx_file_needs_no_key(archipel: Command, mlp: Path) -> None:
    facts = json.loads(archipel("inspect", str(mlp), "--json")[0])
    assert (facts["kind"], facts["ir_version"], facts["opsets"]) == ("onnx", 8, {"": 17})
    assert facts["producer"] == "by hand"
    assert facts["bytes"] == mlp.stat().st_size
    assert facts["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["n", 6]}]
    assert facts["flops_per_example"] == 2 * 6 * 8 + 2 * 8 * 3
    assert [(layer["operator"], layer["weight"], layer["flops"]) for layer in facts["layers"]] == [
        ("Gemm", "w", 96), ("MatMul", "v", 48)
    ]  # fmt: skip
    assert [layer["share"] for layer in facts["layers"]] == pytest.approx([2 / 3, 1 / 3])
    assert [layer["sparsity"] for layer in facts["layers"]] == [0.25, 0.125]
    assert facts["weight_bytes"] == {"float32": 4 * (48 + 8 + 24)}
    assert facts["sparsity"] == {"parameters": pytest.approx(15 / 80), "predict": pytest.approx(15 / 72)}
    assert [(p["name"], p["shape"], p["bytes"], p["trainable"]) for p in facts["parameters"]] == [
        ("w", [6, 8], 192, True), ("b", [8], 32, True), ("v", [8, 3], 96, True)
    ]  # fmt: skip
    # Weights, the input, and of the values inside two at a time.
    assert facts["peak_bytes"] == 4 * (80 + 6 + 8 + 8)


def test_an_onnx_file_as_text(archipel: Command, mlp: Path) -> None:
    out, _ = archipel("inspect", str(mlp))
    for line in ("144 FLOPs per example; 3 nodes: Gemm 1, Relu 1, MatMul 1", "  <- x: float32[n, 6]",
                 "  -> y: float32[n, 3]", "3 parameters, 320 bytes, 18.8% zeros",
                 "bytes of all tensors by type: float32 320"):  # fmt: skip
        assert line in out
    assert "66.7%" not in out
    out, _ = archipel("inspect", str(mlp), "--layers")
    assert "     96  66.7%  25.0%  Gemm      w\n     48  33.3%  12.5%  MatMul    v\n" in out


def test_quantized_weights_are_zero_at_their_zero_point(archipel: Command, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 2] x) => (float[n, 4] y)
    <uint8[2, 4] q = {7, 7, 7, 1, 2, 7, 0, 0}, float s = {0.5}, uint8 z = {7}>
    { w = DequantizeLinear (q, s, z) y = MatMul (x, w) }"""
    (tmp_path / "q.onnx").write_bytes(parser.parse_model(text).SerializeToString())
    facts = json.loads(archipel("inspect", str(tmp_path / "q.onnx"), "--json")[0])
    assert facts["layers"][0]["sparsity"] == 0.5
    assert facts["weight_bytes"] == {"uint8": 9, "float32": 4}


def test_a_bundle(archipel: Command, linear: Linear) -> None:
    facts = json.loads(archipel("inspect", *linear.arguments, "--json")[0])
    assert (facts["kind"], facts["name"], facts["verified"]) == ("bundle", "linear", True)
    assert facts["limits"] == {"peak_bytes": 1000, "flops_per_example": 1, "upload_bytes": 1}
    assert facts["privacy"]["min_cohort"] == 3
    assert facts["self_test"] is None
    assert facts["lineage"] == {"parent": None, "recipe": [], "metrics": {}}
    programs = {program["name"]: program for program in facts["programs"]}
    forms = {name: (program["form"], program["precision"]) for name, program in programs.items()}
    assert forms == {
        "predict": ("deployed", "float32"), "evaluate": (None, "float32"), "train": ("training form", "float32"),
        "refresh": (None, "float32"),
    }  # fmt: skip
    product = 2 * 4 * 3
    assert {name: program["flops_per_example"] for name, program in programs.items()} == {
        "predict": product, "evaluate": 0, "train": 2 * product, "refresh": 0
    }  # fmt: skip
    assert [(layer["operator"], layer["weight"]) for layer in programs["predict"]["layers"]] == [("MatMul", "w")]
    assert programs["train"]["inputs"][2] == {
        "role": "parameter", "name": "w", "tensor": "w", "dtype": "float32", "shape": [4, 3]
    }  # fmt: skip
    assert facts["parameters"] == [
        {"name": "w", "dtype": "float32", "shape": [4, 3], "bytes": 48, "trainable": True, "sparsity": 0.0}
    ]
    assert facts["weight_bytes"] == {"float32": 48}
    files = {path.name: path.stat().st_size for path in linear.folder.iterdir()}
    assert facts["files"] == files
    assert facts["bytes"] == sum(files.values())


def test_a_bundle_as_text(archipel: Command, linear: Linear) -> None:
    out, _ = archipel("inspect", *linear.arguments)
    for line in ("limits: peak 1,000 bytes; 1 FLOPs per example; upload at most 1 bytes", "self-test: none",
                 "  <- example        x: float32[n, 4]", "  -> output         y: float32[n, 3]",
                 "  24 FLOPs per example; 1 nodes: MatMul 1", "1 parameters, 48 bytes, 0.0% zeros",
                 "  weights.safetensors"):  # fmt: skip
        assert line in out
    assert re.search(r"\npredict \(predict, [\d,]+ bytes; deployed, float32\)\n", out)
    assert re.search(r"\ntrain \(train, [\d,]+ bytes; training form, float32\)\n", out)
    assert "\ntrained and adopted: without end; any population; sequence 0\n" in out
    assert "share" not in out
    out, _ = archipel("inspect", *linear.arguments, "--layers")
    assert "     24  100.0%   0.0%  MatMul    w\n" in out


def test_until_when_and_for_whom_a_bundle_is() -> None:
    assert (_until(0), _until(4_102_444_800)) == ("without end", "until 2100-01-01 00:00:00Z")
    assert _until(2**62) == "until 4611686018427387904 (Unix seconds)"
    assert _until(1) == "until 1970-01-01 00:00:01Z (that is over; it still predicts)"


def test_what_secure_rounds_may_be() -> None:
    policy = {"protocols": ["complete"], "dropouts": 0.2, "server": "malicious", "noise_multiplier": 0.0}
    assert _protocols(policy) == []
    other = {"protocols": ["complete", "neighbours"], "dropouts": 0.25, "server": "semi-honest"}
    assert _protocols({**policy, **other}) == [
        "secure rounds: complete or neighbours; over neighbours 0.25 may leave, with a semi-honest server"
    ]
    assert _protocols({**policy, "noise_multiplier": 1.5}) == [
        "noise: devices add it themselves, with a multiplier of 1.5 or more"
    ]


def test_a_bundle_without_its_key(archipel: Command, linear: Linear) -> None:
    _, err = archipel("inspect", str(linear.folder), code=1)
    assert err == f"archipel: {linear.folder}: a bundle is opened with its publisher's key; give --key FILE.pub\n"
    (linear.folder / "manifest.sig").write_bytes(bytes(64))
    assert "trusted keys signed" in archipel("inspect", *linear.arguments, code=1)[1]
    out, err = archipel("inspect", str(linear.folder), "--unverified")
    assert "NOT verified" in err
    assert "NOT VERIFIED" in out.splitlines()[0]
    assert "-> output         y: float32[n, 3]" in out
    facts = json.loads(archipel("inspect", str(linear.folder), "--unverified", "--json")[0])
    assert facts["verified"] is False


def test_a_packed_bundle_unverified(archipel: Command, linear: Linear, tmp_path: Path) -> None:
    from archipel.bundle import pack

    pack(linear.folder, tmp_path / "l.bundle")
    assert "linear  format 1" in archipel("inspect", str(tmp_path / "l.bundle"), "--unverified")[0]
    (linear.folder / "train.onnx").unlink()
    _, err = archipel("inspect", str(linear.folder), "--unverified", code=1)
    assert "train.onnx: not a regular file, but the manifest lists it" in err


def test_a_graph_that_cannot_be_read_is_said(archipel: Command, linear: Linear) -> None:
    (linear.folder / "train.onnx").write_bytes(b"graph")
    out, _ = archipel("inspect", str(linear.folder), "--unverified")
    assert "  graph: " in out
    assert "train.onnx: not " in out
    assert "  <- hyperparameter lr: float32[]" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.onnx"], "none.onnx: no such file; expected a bundle (a folder or a .bundle file) or an ONNX file"),
        (["{mlp}", "--unverified"], "an ONNX file has no signature; leave out --key and --unverified"),
        (["{folder}", "--unverified", "--key", "k.pub"], "--unverified and --key: give one of the two"),
        (["{text}"], "text.onnx: not a valid ONNX file"),
        (["{empty}", "--unverified"], "{empty}: a folder, and no bundle, since it has no manifest.json"),
    ],
)
def test_mistakes_are_one_line(
    archipel: Command, linear: Linear, mlp: Path, tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    (tmp_path / "empty").mkdir()
    places = {"mlp": mlp, "folder": linear.folder, "text": tmp_path / "text.onnx", "empty": tmp_path / "empty"}
    _, err = archipel("inspect", *(each.format(**places) for each in arguments), code=1)
    assert text.format(**places) in err
    assert err.count("\n") == 1


def test_text_is_shown(archipel: Command, tmp_path: Path) -> None:
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (string[n] words) => (string[n] y){ y = StringNormalizer (words) }'
    )
    (tmp_path / "text.onnx").write_bytes(proto.SerializeToString())
    out, _ = archipel("inspect", str(tmp_path / "text.onnx"))
    assert "  <- words: " in out
    assert "peak" not in out  # text has no fixed size
    facts = json.loads(archipel("inspect", str(tmp_path / "text.onnx"), "--json")[0])
    assert (facts["inputs"][0]["shape"], facts["peak_bytes"]) == (["n"], None)


def test_a_saved_model_names_the_bundle_in_it(archipel: Command, linear: Linear, tmp_path: Path) -> None:
    (tmp_path / "saved" / "bundle").mkdir(parents=True)
    _, err = archipel("inspect", str(tmp_path / "saved"), code=1)
    assert f"name the bundle in it: {tmp_path / 'saved' / 'bundle'}" in err


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_device_without_onnx(linear: Linear, command: str) -> None:
    """What needs no graph is shown, and what does says which extra brings it."""
    script = (
        "import sys; sys.modules['onnx'] = sys.modules['onnx_ir'] = None; "
        f"sys.argv = ['archipel', {command!r}, *{list(linear.arguments)!r}]; "
        "from archipel.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'archipel[convert]'" in done.stdout
    assert done.stderr == ""


@pytest.mark.sampled(every=3)
def test_an_onnx_file_without_onnx(mlp: Path) -> None:
    script = (
        "import sys; sys.modules['onnx'] = sys.modules['onnx_ir'] = None; "
        f"sys.argv = ['archipel', 'inspect', {str(mlp)!r}]; from archipel.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "archipel: onnx is not installed; install it with: pip install 'archipel[convert]'\n"


def test_nothing_is_written_beside_an_onnx_file(archipel: Command, mlp: Path) -> None:
    before = sorted(path.name for path in mlp.parent.iterdir())
    archipel("inspect", str(mlp))
    assert sorted(path.name for path in mlp.parent.iterdir()) == before
    onnx.checker.check_model(onnx.load(mlp))
