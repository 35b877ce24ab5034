"""`peak_bytes` against what a process with nothing else takes: the high-water mark of its resident memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from archipel import Model, models
from archipel.converter.limits import compute_limits

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
BATCH = 256

CHILD = """
import sys
import numpy as np
import onnxruntime as ort

def high():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

options = ort.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 4
options.enable_cpu_mem_arena = options.enable_mem_pattern = sys.argv[3] == "arena"
ort.InferenceSession(sys.argv[4], options, providers=["CPUExecutionProvider"]).run(None, {"x": np.zeros(2, np.float32)})
feed = dict(np.load(sys.argv[2]))
open("/proc/self/clear_refs", "w").write("5")
before = high() - sum(array.nbytes for array in feed.values())
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
for _ in range(2):
    session.run(None, feed)
print(high() - before)
"""


def measured(model: Model, folder: Path, arena: bool) -> int:
    """Bytes that building the session and two runs with BATCH examples add to a process with its libraries loaded."""
    rng = np.random.default_rng(0)
    feed: dict[str, np.ndarray] = {}
    for port in model.inputs:
        shape = [d if isinstance(d, int) else BATCH for d in port.shape]
        feed[port.name] = rng.standard_normal(shape).astype(port.dtype)
        if not port.dtype.startswith("float"):
            feed[port.name] = rng.integers(0, 6, shape).astype(port.dtype)
    model.save(folder / "model.onnx")
    np.savez(folder / "feed.npz", **feed)
    tiny = onnx.parser.parse_model(HEADER + "g (float[2] x) => (float[2] y) { y = Exp (x) }")
    onnx.save(tiny, folder / "tiny.onnx")
    names = [str(folder / name) for name in ("model.onnx", "feed.npz")]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *names, "arena" if arena else "none", str(folder / "tiny.onnx")],
        capture_output=True,
        text=True,
        check=True,
        # What is freed goes back to the system at once, so that the mark is what was used together.
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    return int(done.stdout)


# Operators without scratch space: what the graph says is what the process takes.
EXACT = {
    "pointwise": "g (float[b, 4096] x) => (float[b, 4096] y) { a = Exp (x) c = Sin (a) d = Cos (x) y = Add (c, d) }",
    "rows": "g (float[b, 4096] x) => (float[b, 4096] y) { a = Softmax (x) y = Sqrt (a) }",
    "upwards": """g (float[b, 8, 16, 16] x) => (float[b, 8, 32, 32] y) <float[4] s = {1, 1, 2, 2}> {
        y = Resize (x, , s) }""",
    "joined": """g (float[b, 4096] x) => (float[b, 8192] y) { a = Exp (x) c = Neg (x) y = Concat <axis = 1> (a, c) }""",
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.sampled(every=6)
def test_values_are_counted_exactly(name: str, tmp_path: Path) -> None:
    model = Model.from_proto(onnx.parser.parse_model(HEADER + EXACT[name]))
    limit = compute_limits({"p": model}, BATCH).peak_bytes
    assert measured(model, tmp_path, arena=False) == pytest.approx(limit, rel=0.05, abs=400_000)


NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "cnn_1d": (lambda: models.cnn_1d(0), (6, 128)),
    "ds_cnn": (lambda: models.ds_cnn(0), (1, 49, 10)),
    "resnet8": (lambda: models.resnet8(0), (3, 32, 32)),
    "lenet": (lambda: models.lenet(0), (1, 28, 28)),
    "fedavg_cnn": (lambda: models.fedavg_cnn(0), (1, 28, 28)),
    "mlp": (lambda: models.mlp(0), (784,)),
    "unet": (lambda: models.unet(0), (1, 32, 32)),
    "autoencoder": (lambda: models.autoencoder(0), (1, 28, 28)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, tmp_path: Path) -> None:
    """Kernels' scratch (blocked layouts) and the arena, which doubles, come on top: 1.9 and 4.1 times were seen."""
    import torch

    make, shape = NETWORKS[name]
    model = Model.from_torch(make().eval(), torch.randn(2, *shape))
    limit = compute_limits({"p": model}, BATCH).peak_bytes
    fixed = 2 << 20  # the session itself
    assert 0.6 * limit < measured(model, tmp_path, arena=False) < 2.5 * limit + fixed
    assert measured(model, tmp_path, arena=True) < 4.5 * limit + fixed
