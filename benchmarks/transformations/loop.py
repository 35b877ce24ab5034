"""The gradient of a Loop against that of the same iterations unrolled, and against PyTorch autograd.

h <- tanh(h w + b), 10, 100 and 1000 times, from [32, 128]; the gradient of the sum of squares with respect to w, b and
the first h. Seconds to build it, the peak memory of one run (of a process of its own, above what it has before), and
milliseconds a run on one thread, interleaved.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where it is run as a process of its own

from measure import Row, compare, interleave

STEPS, QUICK_STEPS = (10, 100, 1000), (10, 100)
BATCH, WIDTH, THREADS = 32, 128, 1  # products this small gain nothing from two threads
LOOP = """y = Loop <body = body (int64 i, bool c, float[n, {width}] h) => (bool go, float[n, {width}] next) {{
    p = MatMul (h, w)  q = Add (p, b)  next = Tanh (q)  go = Identity (c) }}> (steps, true, x)"""


def loop_gradient(quick: bool) -> Iterator[Row]:
    """Rows of both comparisons."""
    yield from against_unrolled(quick)
    yield from against_pytorch(quick)


def against_unrolled(quick: bool) -> Iterator[Row]:
    build(unrolled(2), 2)  # what is loaded at the first time
    with tempfile.TemporaryDirectory() as folder:
        for steps in QUICK_STEPS if quick else STEPS:
            case = f"{steps} iterations"
            seconds, paths = {}, {}
            for kind, nodes in (("loop", LOOP.format(width=WIDTH)), ("unrolled", unrolled(steps))):
                model, seconds[kind] = build(nodes, steps)
                paths[kind] = Path(folder) / f"{kind}-{steps}.onnx"
                paths[kind].write_bytes(model.to_bytes())
            peaks = {kind: peak_memory(path) for kind, path in paths.items()}
            for unit, values in (("s to build", seconds), ("MB", peaks)):
                ours, peer = values["loop"], values["unrolled"]
                yield Row("loop gradient", case, ours, peer, "unrolled", ours / peer, unit)


def against_pytorch(quick: bool) -> Iterator[Row]:
    import torch

    torch.set_num_threads(THREADS)
    feed = draw_inputs()
    tensors = [torch.tensor(value, requires_grad=True) for value in feed.values()]
    for steps in QUICK_STEPS if quick else STEPS:
        session = open_session(build(LOOP.format(width=WIDTH), steps)[0].to_bytes())

        def eager(steps: int = steps) -> Any:
            h, w, b = tensors
            for _ in range(steps):
                h = torch.tanh(torch.addmm(b, h, w))
            return torch.autograd.grad((h * h).sum(), tensors)

        def ours(session: Any = session) -> Any:
            return session.run([f"{name}.grad" for name in feed], feed)

        for found, expected in zip(ours(), eager()):
            assert np.allclose(found, expected.numpy(), rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
        runs: dict[str, Callable[[], Any]] = {"archipel": ours, "PyTorch autograd": eager}
        yield from compare("loop gradient", f"{steps} iterations", "archipel", interleave(runs, 1.0 if quick else 4.0))


def unrolled(steps: int) -> str:
    names = ["x", *(f"h{i}" for i in range(1, steps)), "y"]
    pairs = enumerate(pairwise(names))
    return " ".join(f"p{i} = MatMul ({a}, w) q{i} = Add (p{i}, b) {z} = Tanh (q{i})" for i, (a, z) in pairs)


def build(nodes: str, steps: int) -> tuple[Any, float]:
    """The model with gradients, and the seconds that differentiation took."""
    import onnx

    from archipel import Model, autodiff

    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[n, {WIDTH}] x, float[{WIDTH}, {WIDTH}] w, float[{WIDTH}] b) => (float loss)
        <int64 steps = {{{steps}}}, bool true = {{1}}> {{ {nodes} loss = ReduceSumSquare <keepdims = 0> (y) }}"""
    model = Model.from_proto(onnx.parser.parse_model(text))
    started = time.perf_counter()
    made = autodiff.gradient(model, of="loss", wrt=["x", "w", "b"])
    return made, time.perf_counter() - started


def draw_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    scale = 1 / WIDTH**0.5  # the states neither die nor become chaotic
    shapes = {"x": (BATCH, WIDTH), "w": (WIDTH, WIDTH), "b": (WIDTH,)}
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def open_session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def peak_memory(path: Path) -> float:
    """Megabytes by which one run raises the peak of a process that has the libraries loaded."""
    script = [sys.executable, __file__, str(path)]
    return float(subprocess.run(script, capture_output=True, text=True, check=True).stdout)


def measure_peak(path: str) -> float:
    content = Path(path).read_bytes()
    import onnxruntime  # noqa: F401  (before the first reading)

    before = peak()
    open_session(content).run(None, draw_inputs())
    return peak() - before


def peak() -> float:
    """Megabytes; of this program alone, where getrusage counts what the process was before it, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    print(measure_peak(sys.argv[1]))
