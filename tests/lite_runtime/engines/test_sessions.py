from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import TensorProto, helper

from archipel import bundle as b
from archipel.bundle.roles import Example, Output
from archipel.errors import RuntimeProgramError
from archipel.lite_runtime.engines.onnx_runtime import Session, bound_value
from archipel.lite_runtime.engines.sessions import Sessions
from tests.support.text_bundles import Roles

W = np.arange(12, dtype=np.float32).reshape(4, 3)
PREDICT = """predict (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}> {
    y = MatMul(x, w)
}"""


@pytest.fixture
def folder(make_bundle: Callable[..., Path], r: type[Roles]) -> Path:
    return make_bundle({"predict": ("predict", PREDICT, {"x": r.example, "y": r.output})}, {"w": W})


@pytest.fixture
def sessions(folder: Path, key: Ed25519PrivateKey) -> Sessions:
    return Sessions(b.open_bundle(folder, [key.public_key().public_bytes_raw()]), threads=2)


def test_a_session_is_made_once_even_when_threads_race(sessions: Sessions) -> None:
    barrier = threading.Barrier(8)
    got: list[Session] = []

    def get() -> None:
        barrier.wait()
        got.append(sessions.get("predict"))

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert {id(session) for session in got} == {id(sessions.get("predict"))}


def test_weights_come_from_the_file_or_from_the_caller(sessions: Sessions) -> None:
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(sessions.get("predict").run(["y"], {"x": x})[0], x @ W)
    other = sessions.open("predict", {"w": W * 3})
    np.testing.assert_allclose(other.run(["y"], {"x": x})[0], x @ W * 3)
    np.testing.assert_allclose(sessions.get("predict").run(["y"], {"x": bound_value(x)})[0], x @ W)


def test_bound_buffers_are_read_and_written_in_place(sessions: Sessions) -> None:
    x, y = np.zeros((1, 4), np.float32), np.empty((1, 3), np.float32)
    session = sessions.get("predict")
    binding = session.native.io_binding()
    binding.bind_ortvalue_input("x", bound_value(x))
    binding.bind_ortvalue_output("y", bound_value(y))
    for value in (1, 5):
        x[...] = value
        session.run_bound(binding)
        np.testing.assert_allclose(y, x @ W)


def test_errors_are_ours_and_quiet(sessions: Sessions, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    session = sessions.get("predict")
    with pytest.raises(RuntimeProgramError, match=r"'predict' cannot be run: ONNX Runtime says: .*x"):
        session.run(["y"], {"x": np.ones((2, 5), np.float32)})
    (folder / "predict.onnx").write_bytes(b"\0" * 64)
    with pytest.raises(RuntimeProgramError, match="'predict' cannot be loaded"):
        sessions.open("predict")
    assert capfd.readouterr() == ("", "")


def test_waiting_threads_do_not_keep_a_core_busy(sessions: Sessions) -> None:
    session = sessions.get("predict")
    x = np.ones((100_000, 4), np.float32)
    session.run(["y"], {"x": x})
    spent, count = 0.0, 20
    for _ in range(count):
        session.run(["y"], {"x": x})
        before = time.process_time()
        time.sleep(0.01)
        spent += time.process_time() - before
    # With ONNX Runtime's defaults the second thread spins through the pause, as far as the machine lets it.
    assert spent / count < 0.001


MEASURE = """
import sys, numpy as np
from pathlib import Path
from archipel.bundle import open_bundle
from archipel.lite_runtime.engines.sessions import Sessions
def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) / 1024
sessions = Sessions(open_bundle(sys.argv[1], [bytes.fromhex(sys.argv[2])]))
small = sessions.get("small").run(["z"], {"x": np.ones((1, 2048), np.float32)})
before = anonymous()
name = sys.argv[3]
feed = {"gather": {"i": np.arange(64)}, "matmul": {"x": np.ones((1, 2048), np.float32)}}[name]
for _ in range(3):
    [out] = sessions.get(name).run([{"gather": "rows", "matmul": "y"}[name]], feed)
assert (out == {"gather": 1, "matmul": 2048}[name]).all()
print(anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="asks Linux how memory is used")
@pytest.mark.parametrize(("name", "least", "most"), [("gather", -1, 4), ("matmul", 30, 38)])
@pytest.mark.sampled(every=4)
def test_weights_are_mapped_and_packed_ones_copied_once(
    big: Path, key: Ed25519PrivateKey, name: str, least: float, most: float
) -> None:
    """MiB of memory that is not the file's: what docs/device.md says, so that a version that differs is noticed."""
    public = key.public_key().public_bytes_raw().hex()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(big), public, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert least <= float(done.stdout) <= most


SHARED = """
import sys, numpy as np
from pathlib import Path
from archipel.bundle import open_bundle
from archipel.lite_runtime.engines.sessions import Sessions
def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) / 1024
sessions = Sessions(open_bundle(sys.argv[1], [bytes.fromhex(sys.argv[2])]))
x = np.ones((8192, 1024), np.float32)
used = []
for name in ("one", "two"):
    before = anonymous()
    for _ in range(3):
        sessions.get(name).run(["y"], {"x": x})
    used.append(anonymous() - before)
print(*used)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="asks Linux how memory is used")
@pytest.mark.sampled(every=4)
def test_programs_use_the_same_memory_one_after_the_other(
    make_bundle: Callable[..., Path], key: Ed25519PrivateKey, r: type[Roles]
) -> None:
    text = "g (float[n, 1024] x) => (float y) { p = Mul(x, x) \n q = Exp(p) \n y = ReduceMax <keepdims = 0> (q) }"
    program = ("predict", text, {"x": r.example, "y": r.output})
    folder = make_bundle({"one": program, "two": program}, {"w": W})
    public = key.public_key().public_bytes_raw().hex()
    done = subprocess.run(
        [sys.executable, "-c", SHARED, str(folder), public], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    assert first > 24  # MiB: the product alone has 32
    assert second < 8


@pytest.fixture
def big(tmp_path: Path, key: Ed25519PrivateKey) -> Path:
    """Programs that read a tensor of 32 MiB: rows of it, and a product with it."""
    weights = b.write_weights({"big": np.ones((2048, 4096), np.float32)})
    place = b.weights_layout(weights, len(weights))["big"]
    tensor = TensorProto(name="big", data_type=TensorProto.FLOAT, dims=[2048, 4096])
    tensor.data_location = TensorProto.EXTERNAL
    for item in {"location": b.WEIGHTS_FILE, "offset": place.offset, "length": place.nbytes}.items():
        tensor.external_data.add(key=item[0], value=str(item[1]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2048])
    graphs, programs = {}, {}
    for name, node, inputs, output in (
        (
            "gather",
            ("Gather", ["big", "i"], ["rows"]),
            helper.make_tensor_value_info("i", TensorProto.INT64, ["n"]),
            4096,
        ),
        ("matmul", ("MatMul", ["x", "big"], ["y"]), x, 4096),
        ("small", ("Neg", ["x"], ["z"]), x, 2048),
    ):
        out = helper.make_tensor_value_info(node[2][0], TensorProto.FLOAT, ["n", output])
        initializers = [] if name == "small" else [tensor]
        graph = helper.make_graph([helper.make_node(*node)], name, [inputs], [out], initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        graphs[f"{name}.onnx"] = model.SerializeToString()
        shape = ("n",) if name == "gather" else ("n", 2048)
        programs[name] = b.Program(
            kind="predict",
            file=f"{name}.onnx",
            inputs=(Example(name=inputs.name, dtype="int64" if name == "gather" else "float32", shape=shape),),
            outputs=(Output(name=node[2][0], dtype="float32", shape=("n", output)),),
        )
    b.write_bundle(
        tmp_path / "big", name="big", programs=programs, graphs=graphs, weights=weights, parameters=(), key=key,
        limits=b.Limits(peak_bytes=1, flops_per_example=1, upload_bytes=1),
        privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=16),
    )  # fmt: skip
    return tmp_path / "big"
