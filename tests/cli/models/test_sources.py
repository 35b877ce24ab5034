"""Every command that takes a model opens the same sources: files, bundles, bundles with weights, saved fits, slots."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from archipel import Model
from archipel import bundle as b
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert
from archipel.lite_runtime import Runtime
from archipel.training import losses, optimizers

Command = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A linear model as a file, as a bundle, and after a fit: as weights and as a saved fit; and the fit's weights."""
    folder, rng = tmp_path_factory.mktemp("sources"), np.random.default_rng(3)
    weights = {"w": rng.standard_normal((3, 8)).astype(np.float32), "b": np.zeros(3, np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="head", transB=1)], "linear",
        [helper.make_tensor_value_info("x", 1, ["batch", 8])], [helper.make_tensor_value_info("y", 1, ["batch", 3])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    file = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), file)
    key = b.generate_key()
    b.save_private_key(key, folder / "key")
    b.save_public_key(key, folder / "key.pub")
    x = rng.standard_normal((64, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, label=(x @ weights["w"].T).argmax(1))
    np.save(folder / "x.npy", x)
    training = Training(losses.cross_entropy(), optimizers.sgd(lr=0.5))
    convert(file, folder / "int8", training=training, signing=Signing(key),
            compression=Compression([StaticInt8()], calibration={"x": x}))  # fmt: skip
    device = Runtime(convert(file, folder / "m.bundle", training=training, signing=Signing(key)))
    device.fit(x, rng.integers(0, 3, 64), epochs=3)
    device.save(folder / "saved")
    learned = device.parameters()
    (folder / "w.safetensors").write_bytes(b.write_weights(learned))
    assert np.abs(learned["w"] - weights["w"]).max() > 0.01
    return SimpleNamespace(folder=folder, x=x, weights=weights, learned=learned)


def arguments(made: SimpleNamespace, kind: str, weights: str = "--weights") -> list[str]:
    """The source, with its weights where it has any."""
    name = {"file": "m.onnx", "bundle": "m.bundle", "weights": "m.bundle", "saved": "saved"}[kind]
    given = [weights, str(made.folder / "w.safetensors")] if kind == "weights" else []
    return [str(made.folder / name), *given]


def expected(made: SimpleNamespace, kind: str) -> np.ndarray:
    tensors = made.learned if kind in ("weights", "saved") else made.weights
    result: np.ndarray = made.x @ tensors["w"].T + tensors["b"]
    return result


def key(made: SimpleNamespace, kind: str) -> list[str]:
    return [] if kind == "file" else ["--key", str(made.folder / "key.pub")]


def answers(file: Path, x: np.ndarray) -> np.ndarray:
    [result] = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(["y"], {"x": x})
    return np.asarray(result)


KINDS = ("file", "bundle", "weights", "saved")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", KINDS)
def test_run_export_and_convert(archipel: Command, made: SimpleNamespace, kind: str, tmp_path: Path) -> None:
    source, trusted, right = arguments(made, kind), key(made, kind), expected(made, kind)
    archipel("run", *source, *trusted, "--input", str(made.folder / "x.npy"), "--output", str(tmp_path / "y.npz"))
    with np.load(tmp_path / "y.npz") as written:
        np.testing.assert_allclose(written["y"], right, atol=1e-5)
    out, _ = archipel("export", *source, *trusted, "-o", str(tmp_path / "m.onnx"))
    assert out == f"{tmp_path / 'm.onnx'}: {(tmp_path / 'm.onnx').stat().st_size:,} bytes, 2 parameters of 27 numbers\n"
    np.testing.assert_allclose(answers(tmp_path / "m.onnx", made.x), right, atol=1e-5)
    archipel("convert", *source, "-o", str(tmp_path / "again"), "--key", str(made.folder / "key"), "--loss", "mse")
    again = b.open_bundle(tmp_path / "again", [b.load_public_key(made.folder / "key.pub")])
    np.testing.assert_allclose(Runtime(again).predict(made.x), right, atol=1e-5)
    assert {spec.name: spec.shape for spec in again.manifest.parameters} == {"w": (3, 8), "b": (3,)}
    parent = b.open_bundle(made.folder / "m.bundle", [again.publisher], cache=tmp_path / "cache").digest
    assert again.manifest.lineage.parent == (None if kind == "file" else parent)


@pytest.mark.parametrize("kind", KINDS)
def test_compress_and_compare(archipel: Command, made: SimpleNamespace, kind: str, tmp_path: Path) -> None:
    trusted, data = key(made, kind), str(made.folder / "data.npz")
    small = tmp_path / "small.onnx"
    archipel(
        "compress", *arguments(made, kind), *trusted, "-o", str(small), "--calibration", str(made.folder / "x.npy")
    )
    right = expected(made, kind)
    assert np.abs(answers(small, made.x) - right).max() < 0.05 * np.abs(right).max()
    exported = tmp_path / "m.onnx"
    onnx.save(with_weights(made, kind), exported)
    out, _ = archipel("compare", *arguments(made, kind, "--weights-a"), str(exported), *trusted, "--data", data)
    assert "nothing diverges" in out
    assert "equal" in out or float(out.splitlines()[3].split()[0]) > 100  # dB, of the output
    if kind in ("weights", "saved"):  # and it is the learned form that is compared
        out, _ = archipel("compare", *arguments(made, kind, "--weights-a"), str(made.folder / "m.onnx"), *trusted,
                          "--data", data)  # fmt: skip
        assert "first to diverge" in out


def with_weights(made: SimpleNamespace, kind: str) -> onnx.ModelProto:
    model = onnx.load(made.folder / "m.onnx")
    tensors = made.learned if kind in ("weights", "saved") else made.weights
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(tensors[tensor.name], tensor.name))
    return model


def test_an_int8_bundle_is_compared_with_what_it_has_learned(
    archipel: Command, made: SimpleNamespace, tmp_path: Path
) -> None:
    """Its integers are those of the present weights: compared as it predicts, exported and compressed in float."""
    int8, trusted = [str(made.folder / "int8"), "--weights-a", str(made.folder / "w.safetensors")], key(made, "saved")
    exported = tmp_path / "m.onnx"
    onnx.save(with_weights(made, "saved"), exported)
    out, _ = archipel("compare", *int8, str(exported), *trusted, "--data", str(made.folder / "data.npz"))
    assert "nothing diverges" in out
    assert 25 < float(out.splitlines()[3].split()[0]) < 80  # dB: integers, of the right weights
    archipel("export", int8[0], "--weights", int8[2], *trusted, "-o", str(tmp_path / "e.onnx"))
    np.testing.assert_allclose(answers(tmp_path / "e.onnx", made.x), expected(made, "saved"), atol=1e-5)


def test_another_publishers_bundle_is_converted_with_its_key(
    archipel: Command, made: SimpleNamespace, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    b.save_private_key(b.generate_key(), mine)
    given = ["convert", str(made.folder / "m.bundle"), "-o", str(tmp_path / "out"), "--key", str(mine)]
    err = archipel(*given, code=1)[1]
    assert "none of the 1 trusted keys signed" in err
    assert "give the key of the bundle's publisher, --source-key FILE.pub" in err
    archipel(*given, "--source-key", str(made.folder / "key.pub"))
    assert (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("command", ["run", "export", "compress", "compare", "convert"])
def test_errors(archipel: Command, made: SimpleNamespace, command: str, tmp_path: Path) -> None:
    x, file = str(made.folder / "x.npy"), str(made.folder / "w.safetensors")
    rest = {
        "run": ["--input", x],
        "export": ["-o", str(tmp_path / "m.onnx")],
        "compress": ["-o", str(tmp_path / "m.onnx"), "--calibration", x],
        "compare": [str(made.folder / "m.onnx"), "--data", x],
        "convert": ["-o", str(tmp_path / "b"), "--key", str(made.folder / "key")],
    }[command]
    option = "--weights-a" if command == "compare" else "--weights"
    trusted = [] if command == "convert" else key(made, "bundle")
    err = archipel(command, str(made.folder / "m.onnx"), *rest, option, file, code=1)[1]
    assert "--weights are for a bundle" in err
    bundle = str(made.folder / "m.bundle")
    if command != "convert":
        assert (
            "a bundle is opened with its publisher's key; give --key FILE.pub"
            in archipel(command, bundle, *rest, code=1)[1]
        )
    (tmp_path / "w").write_bytes(b.write_weights({**made.learned, "w": np.zeros((3, 9), np.float32)}))
    err = archipel(command, bundle, *rest, *trusted, option, str(tmp_path / "w"), code=1)[1]
    assert "'w' is float32[3, 9], but float32[3, 8] in bundle" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w"]


def test_an_onnx_file_has_no_metrics(archipel: Command, made: SimpleNamespace) -> None:
    err = archipel("run", str(made.folder / "m.onnx"), "--input", str(made.folder / "data.npz"), "--evaluate", code=1)[
        1
    ]
    assert "has no metrics; make a bundle of it with `archipel convert --loss`" in err


def test_an_export_replaces_nothing_unless_it_is_forced(
    archipel: Command, made: SimpleNamespace, tmp_path: Path
) -> None:
    target = tmp_path / "m.safetensors"
    target.write_bytes(b"mine")
    given = ["export", *arguments(made, "weights"), *key(made, "weights"), "-o", str(target)]
    assert "exists already; choose another name, or replace it with --force" in archipel(*given, code=1)[1]
    assert target.read_bytes() == b"mine"
    archipel(*given, "--force")
    for name, array in b.read_weights(target.read_bytes()).items():
        np.testing.assert_array_equal(array, made.learned[name])
    shutil.copytree(made.folder / "saved", tmp_path / "slot")  # a copy, whose weights have one name
    archipel("export", str(tmp_path / "slot"), *key(made, "saved"), "-o", str(tmp_path / "s.onnx"))
    assert Model.from_onnx(tmp_path / "s.onnx").parameter_names == ("w", "b")


def test_inspect_says_that_a_bundle_exports(archipel: Command, made: SimpleNamespace, tmp_path: Path) -> None:
    line = "source: source.onnx, the float model as it was converted, for `archipel export`"
    assert line in archipel("inspect", str(made.folder / "m.bundle"), *key(made, "bundle"))[0].splitlines()
    archipel("convert", str(made.folder / "m.onnx"), "-o", str(tmp_path / "p"), "--key", str(made.folder / "key"))
    assert "source:" not in archipel("inspect", str(tmp_path / "p"), *key(made, "bundle"))[0]


def test_a_file_that_the_runtime_does_not_run(archipel: Command, made: SimpleNamespace, tmp_path: Path) -> None:
    text = [helper.make_tensor_value_info(name, onnx.TensorProto.STRING, ["n"]) for name in "xy"]
    wide = [helper.make_tensor_value_info(name, 1, ["n", 8]) for name in "xy"]
    for node, (field, answer), refusal in (
        (helper.make_node("Identity", ["x"], ["y"]), text, "x"),
        (helper.make_node("FastGelu", ["x"], ["y"], domain="com.microsoft"), wide, "com.microsoft"),
    ):
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "odd", [field], [answer])
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "odd.onnx")
        err = archipel("run", str(tmp_path / "odd.onnx"), "--input", str(made.folder / "x.npy"), code=1)[1]
        assert err.startswith(f"archipel: {tmp_path / 'odd.onnx'}: ")
        assert refusal in err
