from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from archipel.cli.input_output.arrays import MAX_ENTRIES, read_arrays, write_arrays
from archipel.errors import CommandError
from tests.support.commands import Command, Linear


@pytest.fixture
def data(tmp_path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((150, 4)).astype(np.float32), "label": rng.integers(0, 3, 150)}
    np.savez(tmp_path / "data.npz", **arrays)
    np.save(tmp_path / "x.npy", arrays["x"])
    np.save(tmp_path / "label.npy", arrays["label"])
    return arrays


def test_predictions_are_those_of_onnx_runtime(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    native = onnxruntime.InferenceSession(linear.folder / "predict.onnx", providers=["CPUExecutionProvider"])
    [expected] = native.run(None, {"x": data["x"]})
    np.testing.assert_allclose(expected, data["x"] @ linear.w, rtol=1e-4, atol=1e-5)
    for name in ("x.npy", "data.npz"):
        out, err = archipel(
            "run", *linear.arguments, "--input", str(tmp_path / name), "--output", str(tmp_path / "o.npz")
        )
        assert err == ""
        with np.load(tmp_path / "o.npz") as written:
            assert written.files == ["y"]
            np.testing.assert_allclose(written["y"], expected, rtol=1e-6)
        assert "y: float32[150, 3]" in out
        classes = expected.argmax(1)
        assert f"largest: {' '.join(map(str, classes[:10]))} ..." in out
        for each in range(3):
            assert f"{each}: {(classes == each).sum()}" in out
        assert f"written to {tmp_path / 'o.npz'}" in out


@pytest.mark.parametrize(
    ("graph", "shapes"),
    [
        (
            """(float[n, 4] x, float[2, n, 4] h, int64 rate) => (float[n, 4] y, float[2, n, 4] hn) {
            k = Cast <to = 1> (rate)  s = Mul (x, k)  hn = Add (h, s)  y = ReduceSum <keepdims = 0> (hn, axis) }""",
            {"x": (150, 4), "h": (2, 150, 4), "rate": ()},
        ),
        (
            "(float[n, 4] x) => (float m, float[n, 4] y) { m = ReduceMean <keepdims = 0> (x)  y = Neg (x) }",
            {"x": (150, 4)},
        ),
        (
            """(float[n, 4] x) => (float[2, n, 4] hn) { a = Unsqueeze (x, axis)  b = Neg (a)
            hn = Concat <axis = 0> (a, b) }""",
            {"x": (128, 4)},
        ),
    ],
)
def test_a_model_whose_first_axes_are_no_common_batch_runs_once(
    graph: str, shapes: dict[str, tuple[int, ...]], archipel: Command, tmp_path: Path
) -> None:
    text = f'<ir_version: 10, opset_import: ["": 21]> agraph {graph}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    onnx.save(model, tmp_path / "m.onnx")
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if "rate" in arrays:
        arrays["rate"] = np.array(3)
    np.savez(tmp_path / "data.npz", **arrays)
    outputs = str(tmp_path / "o.npz")
    archipel("run", str(tmp_path / "m.onnx"), "--input", str(tmp_path / "data.npz"), "--output", outputs)
    native = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    with np.load(outputs) as written:
        for port, expected in zip(native.get_outputs(), native.run(None, arrays)):
            np.testing.assert_array_equal(written[port.name], expected)


def test_answers_of_batches_that_cannot_be_joined(archipel: Command, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> agraph (float[n, 4] x) => (float[m, 4] y) {
            sums = ReduceSum <keepdims = 0> (x, axis)  keep = Cast <to = 9> (sums)
            y = Compress <axis = 0> (x, keep) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    onnx.save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.eye(150, 4, dtype=np.float32))
    run = ("run", str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npy"))
    error = archipel(*run, code=1)[1]
    assert "output 'y' has another first axis than the examples, [4, 4]" in error
    assert "give --batch-size" in error
    assert "y: float32[4, 4]" in archipel(*run, "--batch-size", "150")[0]


def test_evaluate_prints_the_metrics(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    correct = ((data["x"] @ linear.w).argmax(1) == data["label"]).sum()
    both = ["--input", str(tmp_path / "data.npz")]
    apart = ["--input", str(tmp_path / "x.npy"), "--labels", str(tmp_path / "label.npy")]
    np.savez(tmp_path / "xy.npz", x=data["x"], y=data["label"])
    for given in (both, apart, ["--input", str(tmp_path / "xy.npz")]):
        out, err = archipel("run", *linear.arguments, *given, "--evaluate", "--batch-size", "64")
        assert err == "measured: means of what predict answers (float32)\n"
        assert dict(line.split() for line in out.splitlines()) == {"accuracy": f"{correct / 150:.6g}", "count": "150"}


def test_named_delegates_are_reported(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    given = [*linear.arguments, "--input", str(tmp_path / "x.npy")]
    _, err = archipel("run", *given, "--delegate", "cuda", "--delegate", "cpu")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        assert "not on cuda: not in this build of ONNX Runtime" in err
        _, err = archipel("run", *given, "--delegate", "cuda", code=1)
        assert err.count("\n") == 1
    _, err = archipel("run", *given, "--delegate", "gpu", code=1)
    assert "'gpu' is not known; choose from" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"z": np.zeros((2, 4), np.float32)}, "no entry 'x' (float32[n, 4]); it has z"),
        ({"x": np.zeros((2, 4))}, "entry 'x' must be float32[n, 4], is float64[2, 4]; save it as x.astype('float32')"),
        ({"x": np.zeros((2, 5), np.float32)}, "entry 'x' must be float32[n, 4], is float32[2, 5]"),
        ({"x": np.zeros(4, np.float32)}, "is float32[4]; add the batch axis with x[None]"),
        ({"x": np.zeros((0, 4), np.float32)}, "at least 1"),
        ({"x": np.array([["a"] * 4])}, "expected numbers or bools"),
        ({"x": np.array([[object()] * 4])}, "nothing is unpickled"),
    ],
)
def test_errors_name_file_and_entry(
    linear: Linear, archipel: Command, tmp_path: Path, arrays: dict[str, np.ndarray], text: str
) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    _, err = archipel("run", *linear.arguments, "--input", str(path), code=1)
    assert err.startswith(f"archipel: {path}: ")
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--evaluate", "--output", "o.npz"], "--output is for predictions"),
        (["--labels", "label.npy"], "--labels is for --evaluate"),
    ],
)
def test_options_that_make_no_sense(
    linear: Linear, archipel: Command, data: dict[str, np.ndarray], tmp_path: Path, options: list[str], text: str
) -> None:
    _, err = archipel("run", *linear.arguments, "--input", str(tmp_path / "x.npy"), *options, code=1)
    assert text in err


def test_a_bundle_of_someone_else_is_not_run(
    linear: Linear, archipel: Command, data: dict[str, np.ndarray], tmp_path: Path
) -> None:
    archipel("keys", str(tmp_path / "other"))
    _, err = archipel(
        "run", str(linear.folder), "--key", str(tmp_path / "other.pub"), "--input", str(tmp_path / "x.npy"), code=1
    )
    assert "none of the 1 trusted keys signed this manifest" in err


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int64).reshape(3, 4), np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(3, np.uint8), np.zeros((0, 5), np.float16), np.arange(4, dtype=">i4"), np.array([True, False]),
    ],
)  # fmt: skip
def test_arrays_survive(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "b.npz", a=array)
    write_arrays(tmp_path / "c.npz", {"a": array, "file": array})
    with np.load(tmp_path / "c.npz") as numpys:
        np.testing.assert_array_equal(numpys["a"], array)
    for name in ("a.npy", "b.npz", "c.npz"):
        got: Any = read_arrays(tmp_path / name)
        got = got["a"] if isinstance(got, dict) else got
        np.testing.assert_array_equal(got, array)
        assert got.dtype == array.dtype.newbyteorder("=")
        assert got.shape == array.shape


def npy(header: bytes, data: bytes = b"") -> bytes:
    text = header + b" " * (118 - len(header) - 1) + b"\n" if len(header) < 118 else header
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


GOOD = npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", b"\0" * 8)
HUGE = npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }", b"\0" * 8)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not an .npy or .npz file"),
        (b"PK\x03\x04 and nothing", "not an .npz file that can be read"),
        (HUGE, "needs 4,000,000,000,000 bytes, the file has 8"),
        (GOOD[:-1], "needs 8 bytes, the file has 7"),
        (GOOD + b"\0", "needs 8 bytes, the file has 9"),
        (npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"\x80\x04N."), "nothing is unpickled"),
        (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -2), }", b"\0" * 8), "bytes"),
        (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 30000 + b"), }"), "not an .npy"),
        (npy(b"__import__('os').abort()"), "not an .npy or .npz file"),
        (b"\x93NUMPY\x03\x00" + GOOD[8:], "version (3, 0)"),
        (archive({"x.npy": HUGE}), "entry 'x': float32[1000000000000] needs"),
        (archive({"x.txt": GOOD}), "'x.txt' is not an array of its own"),
        (archive({}), "not an .npy or .npz"),
        (archive({f"{i}.npy": GOOD for i in range(MAX_ENTRIES + 1)}), "257 entries"),
        (archive({"x.npy": GOOD}).replace(b"NUMPY", b"NUMPX"), "x"),
    ],
)
def test_hostile_files_are_errors(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    with pytest.raises(CommandError, match=text.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[")):
        read_arrays(path)


@pytest.mark.sampled(every=3)
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    path.write_bytes(archive({"x.npy": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 100_000
    with pytest.raises(CommandError, match=r"50,000,000 bytes of arrays, the limit is 1,000,000"):
        read_arrays(path, max_bytes=1_000_000)


def test_output_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "o.npz"
    write_arrays(path, {"a": np.zeros(3)})
    write_arrays(path, {"b": np.ones(2)})
    with np.load(path) as written:
        assert written.files == ["b"]
    assert [each.name for each in tmp_path.iterdir()] == ["o.npz"]
