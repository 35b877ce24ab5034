"""`archipel verify` on bundles that are good, and on bundles with one thing wrong each."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

from archipel import bundle as b
from archipel import converter, training
from archipel.converter import Signing, Training
from archipel.graph import Model
from tests.support.commands import Command

MLP = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y) <float[6, 8] w, float[8, 3] v>
{ h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundle "good" and the key that signed it."""
    folder = tmp_path_factory.mktemp("made")
    key = b.generate_key()
    b.save_private_key(key, folder / "k")
    b.save_public_key(key, folder / "k.pub")
    rng = np.random.default_rng(2)
    proto = parser.parse_model(MLP)
    for name, shape in {"w": (6, 8), "v": (8, 3)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    converter.convert(
        Model.from_proto(proto), folder / "good",
        training=Training(training.losses.cross_entropy(), training.optimizers.sgd(), batch_size=4),
        signing=Signing(key),
    )  # fmt: skip
    return folder


@pytest.fixture
def again(made: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Sign the good bundle with changes; gives the command's arguments."""

    def sign(**changes: Any) -> list[str]:
        key = b.load_private_key(made / "k")
        good = b.open_bundle(made / "good", [key.public_key().public_bytes_raw()])
        manifest = good.manifest
        test = manifest.self_test
        assert test is not None
        given: dict[str, Any] = {
            "limits": manifest.limits,
            "graphs": {p.file: (good.folder / p.file).read_bytes() for p in manifest.programs.values()},
            "self_test": (test, (good.folder / test.file).read_bytes()),
        }
        given["graphs"].update(changes.pop("graphs", {}))
        given.update(changes)
        b.write_bundle(
            tmp_path / "changed", name="changed", programs=manifest.programs, key=key, parameters=manifest.parameters,
            weights=(good.folder / b.WEIGHTS_FILE).read_bytes(), privacy=manifest.privacy, schedule=manifest.schedule,
            strategy=manifest.strategy, **given,
        )  # fmt: skip
        return ["verify", str(tmp_path / "changed"), "--key", str(made / "k.pub")]

    return sign


def test_a_good_bundle(archipel: Command, made: Path, tmp_path: Path) -> None:
    b.pack(made / "good", tmp_path / "good.bundle")
    for path in (made / "good", tmp_path / "good.bundle"):
        out, err = archipel("verify", str(path), "--key", str(made / "k.pub"))
        lines = out.splitlines()
        assert all(line.startswith("ok       ") for line in lines[:-1])
        assert [line.split()[1].rstrip(":") for line in lines[:5]] == [
            "archive", "signature", "manifest", "digests", "parameters"
        ]  # fmt: skip
        valid = [line.split()[2].rstrip(":") for line in lines if "valid for ONNX Runtime" in line]
        assert {"predict", "evaluate", "train", "refresh", "finish"} <= set(valid)
        assert "parameters: 2 tensors, 288 bytes" in out  # (6 * 8 + 8 * 3) * 4
        assert lines[-1].startswith(f"{path}: good; 'good', digest ")
        assert err == ""


def test_the_limits_are_computed_from_the_graphs(archipel: Command, made: Path) -> None:
    """As the converter computed them, by another way: from the files and not from the model."""
    out, _ = archipel("verify", str(made / "good"), "--key", str(made / "k.pub"))
    limits = b.open_bundle(made / "good", [b.load_public_key(made / "k.pub")]).manifest.limits
    assert "limits: computed again for batches of 4: " in out
    for text, value in (("peak bytes", limits.peak_bytes), ("FLOPs per example", limits.flops_per_example),
                        ("upload bytes", limits.upload_bytes)):  # fmt: skip
        assert f"{text} {value:,} of {value:,}" in out
    assert limits.upload_bytes == 4 * (6 * 8 + 8 * 3 + 1)  # and the weight


@pytest.mark.parametrize("field", ["peak_bytes", "flops_per_example", "upload_bytes"])
def test_limits_below_what_the_graphs_need(
    archipel: Command, again: Callable[..., list[str]], made: Path, field: str
) -> None:
    import msgspec

    good = b.open_bundle(made / "good", [b.load_public_key(made / "k.pub")]).manifest.limits
    need = getattr(good, field)
    arguments = again(limits=msgspec.structs.replace(good, **{field: need - 1}))
    out, err = archipel(*arguments, code=1)
    assert f"signed {need - 1:,}, the graphs need {need:,}" in err
    assert err.startswith("archipel: ")
    assert err.count("\n") == 1
    assert "FAILED   limits: too low for batches of 4" in out
    assert "ok       self-test" in out


def test_limits_above_are_good(archipel: Command, again: Callable[..., list[str]]) -> None:
    arguments = again(limits=b.Limits(peak_bytes=1 << 30, flops_per_example=1 << 30, upload_bytes=1 << 30))
    assert "of 1,073,741,824" in archipel(*arguments)[0]


def test_answers_that_are_not_those_of_the_self_test(
    archipel: Command, again: Callable[..., list[str]], made: Path
) -> None:
    good = b.open_bundle(made / "good", [b.load_public_key(made / "k.pub")])
    test = good.manifest.self_test
    assert test is not None
    tensors = {name: array.copy() for name, array in b.read_weights(good.folder / test.file).items()}
    tensors["output/y"][1, 2] += 5
    arguments = again(self_test=(test, b.write_weights(tensors)))
    out, err = archipel(*arguments, code=1)
    assert "self-test: self-test: output 'y' deviates by up to 5" in err
    assert "at [1, 2]" in err
    out, _ = archipel(*arguments, "--no-run")
    assert "skipped  self-test: left out (--no-run)" in out


def test_without_vectors(archipel: Command, again: Callable[..., list[str]]) -> None:
    assert "ok       self-test: no vectors in the bundle" in archipel(*again(self_test=None))[0]


def test_a_graph_that_onnxruntime_refuses(archipel: Command, again: Callable[..., list[str]]) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) { y = Relu(nowhere) }'
    graph = parser.parse_model(text).SerializeToString()
    out, err = archipel(*again(graphs={"evaluate.onnx": graph}), code=1)
    assert "FAILED   program evaluate: " in out
    assert "ok       program predict: " in out
    assert "FAILED   limits: cannot be computed: " in out
    assert "skipped  self-test: not reached" in out
    assert re.search(rf"changed: 2 of {len(out.splitlines())} checks failed: program evaluate: ", err)
    assert err.count("\n") == 1


def test_another_graph_than_the_manifest_says(archipel: Command, again: Callable[..., list[str]], made: Path) -> None:
    graph = (made / "good" / "refresh.onnx").read_bytes()
    out, _ = archipel(*again(graphs={"predict.onnx": graph}), code=1)
    assert "FAILED   program predict: " in out


def changed_file(folder: Path) -> None:
    (folder / "predict.onnx").write_bytes(b"other")


def foreign_file(folder: Path) -> None:
    (folder / "more.txt").write_text("more")


def other_manifest(folder: Path) -> None:
    data = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(data.replace(b'"changed"', b'"chanted"'))


def missing_file(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()


def test_a_signed_bundle_with_an_unsafe_graph(archipel: Command, again: Callable[..., list[str]], made: Path) -> None:
    """Its publisher signed a graph of another vendor's operators."""
    arguments = again()
    folder = Path(arguments[1])
    graph = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "com.vendor": 1]> g (float[n, 6] x) => (float[n, 3] y) '
        "{ y = com.vendor.Anything (x) }"
    )
    before = hashlib.sha256((folder / "predict.onnx").read_bytes()).hexdigest()
    (folder / "predict.onnx").write_bytes(graph.SerializeToString())
    after = hashlib.sha256(graph.SerializeToString()).hexdigest()
    manifest = (folder / "manifest.json").read_bytes().replace(before.encode(), after.encode())
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "manifest.sig").write_bytes(b.load_private_key(made / "k").sign(manifest))
    out, err = archipel(*arguments, code=1)
    [failed] = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert failed.startswith("FAILED   graphs: ")
    assert "com.vendor" in failed
    assert "com.vendor" in err
    assert [line.split()[0] for line in out.splitlines()[:5]] == ["ok"] * 5


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        (changed_file, "digests", "the manifest says"),
        (foreign_file, "digests", "'more.txt' is not in the manifest"),
        (other_manifest, "signature", "none of the 1 trusted keys signed this manifest"),
        (missing_file, "digests", "cannot be read"),
    ],
)
def test_what_was_changed_after_signing(
    archipel: Command, again: Callable[..., list[str]], change: Callable[[Path], None], check: str, text: str
) -> None:
    arguments = again()
    change(Path(arguments[1]))
    out, err = archipel(*arguments, code=1)
    [failed] = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert failed.startswith(f"FAILED   {check}: ")
    assert text in failed
    assert text in err
    after = out.splitlines()[out.splitlines().index(failed) + 1 :]
    assert all(line.startswith("skipped") and line.endswith("not reached") for line in after)
    assert "program" not in out.replace("programs", "")


def test_as_json(archipel: Command, again: Callable[..., list[str]], made: Path) -> None:
    answer = json.loads(archipel("verify", str(made / "good"), "--key", str(made / "k.pub"), "--json")[0])
    assert answer["good"] is True
    assert answer["digest"] == b.open_bundle(made / "good", [b.load_public_key(made / "k.pub")]).digest
    assert {check["good"] for check in answer["checks"]} == {True}
    arguments = again()
    changed_file(Path(arguments[1]))
    out, err = archipel(*arguments, "--json", code=1)
    answer = json.loads(out)
    assert (answer["good"], answer["digest"]) == (False, None)
    assert [check["good"] for check in answer["checks"]] == [True, True, True, False, None, None]
    assert err.count("\n") == 1


def test_a_bundle_that_only_predicts_is_checked_for_one_example(archipel: Command, made: Path, tmp_path: Path) -> None:
    proto = parser.parse_model(MLP)
    for name, shape in {"w": (6, 8), "v": (8, 3)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    key = b.load_private_key(made / "k")
    converter.convert(Model.from_proto(proto), tmp_path / "p.bundle", signing=Signing(key))
    out, _ = archipel("verify", str(tmp_path / "p.bundle"), "--key", str(made / "k.pub"))
    # Weights, the input, and two values of 8 at a time.
    assert f"computed again for batches of 1: peak bytes {4 * (72 + 6 + 8 + 8):,} of " in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none", "--key", "{made}/k.pub"], "none: no such bundle"),
        (["{made}/good", "--key", "{made}/no.pub"], "no.pub: no such key"),
        (["{made}/good", "--key", "{made}/k"], "this is a private key; give its public half"),
        (["{made}/k.pub", "--key", "{made}/k.pub"], "not a bundle file"),
        # Nothing of the bundle was checked, so nothing is said to be good.
        (["{made}/good", "--key", "{made}/good/manifest.json"], "(an Ed25519 public key), got"),
    ],
)
def test_mistakes_are_one_line(archipel: Command, made: Path, arguments: list[str], text: str) -> None:
    out, err = archipel("verify", *(each.format(made=made) for each in arguments), code=1)
    assert text in err
    assert err.count("\n") == 1
    assert " ok" not in f" {out}"
