"""The other end of engines.py: trains a step graph on one engine, in a process and an environment of its own.

    python train_steps.py ENGINE FOLDER THREADS DESCRIPTOR

FOLDER has the graphs, initial.npz, feed0.npz ... and job.json. Answers are lines of JSON on that file descriptor: first
the losses of all steps, or an error, then the milliseconds of a step for each line that comes in.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Step = Callable[[Arrays], float]
"""Feeds a minibatch; the step's loss."""


class Job:
    """A step graph with its first values, the inputs that its outputs become, and minibatches.

    For frameworks that do not take the graph: the `network`'s name and its first `weights`, of PyTorch's names; feeds
    have the examples first, then the labels.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        told = json.loads((folder / "job.json").read_text())
        self.carried: dict[str, str] = told["carried"]
        self.outputs: list[str] = told["outputs"]
        self.inputs: list[str] = told["inputs"]
        self.initial: Arrays = dict(np.load(folder / "initial.npz"))
        self.feeds: list[Arrays] = [dict(np.load(path)) for path in sorted(folder.glob("feed*.npz"))]
        self.steps: int = told["steps"]
        self.kept: list[np.ndarray] = []
        self.network: str = told.get("network", "")
        self.classes: int = told.get("classes", 0)
        self.rate, self.momentum = (float(told.get(name, 0)) for name in ("rate", "momentum"))

    @property
    def weights(self) -> Arrays:
        return dict(np.load(self.folder / "weights.npz"))

    def two_sets(self) -> list[Arrays]:
        """Buffers of what is carried, by input: a step reads one set and writes the other."""
        return [{name: np.array(self.initial[name]) for name in self.carried.values()} for _ in range(2)]

    def constant(self) -> Arrays:
        moving = set(self.carried.values())
        return {name: np.array(value) for name, value in self.initial.items() if name not in moving}


def onnxruntime(job: Job, threads: int, kernels: bool = False) -> Step:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.enable_mem_pattern = options.enable_mem_reuse = False  # as the Lite runtime sets them for training
    if kernels:
        from archipel.lite_runtime.engines.kernels import kernel_pack

        kernel_pack().register(options, threads)
    graph = job.folder / ("native.onnx" if kernels else "step.onnx")
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    loss, sets, bindings = np.zeros((), np.float32), job.two_sets(), []
    for read, written in (sets, sets[::-1]):
        binding = session.io_binding()
        for name, array in {**job.constant(), **read}.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for output, name in job.carried.items():
            binding.bind_ortvalue_output(output, ort.OrtValue.ortvalue_from_numpy(written[name]))
        binding.bind_ortvalue_output("loss", ort.OrtValue.ortvalue_from_numpy(loss))
        bindings.append(binding)

    def step(feed: Arrays) -> float:
        for name, array in feed.items():
            bindings[0].bind_cpu_input(name, array)
        session.run_with_iobinding(bindings[0])
        bindings.reverse()
        return float(loss)

    return step


def native(job: Job, threads: int) -> Step:
    """ONNX Runtime with the kernel pack."""
    return onnxruntime(job, threads, kernels=True)


def openvino(job: Job, threads: int) -> Step:
    import openvino as ov

    try:
        model = ov.Core().read_model(job.folder / "step.onnx")
    except RuntimeError as error:
        if "Scan" not in str(error):
            raise
        print("plain", file=sys.stderr)
        model = ov.Core().read_model(job.folder / "plain.onnx")
    model.reshape({name: list(value.shape) for name, value in {**job.initial, **job.feeds[0]}.items()})
    settings = {
        "INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY", "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1,
    }  # fmt: skip
    plan = ov.compile_model(model, "CPU", settings)

    def tensor(array: np.ndarray) -> Any:
        job.kept.append(array)  # OpenVINO only points to it
        return ov.Tensor(array, shared_memory=True)

    loss, sets, requests = np.zeros((), np.float32), job.two_sets(), []
    batch = {name: np.array(value) for name, value in job.feeds[0].items()}
    for read, written in (sets, sets[::-1]):
        request = plan.create_infer_request()
        for name, array in {**job.constant(), **batch, **read}.items():
            request.set_tensor(name, tensor(array))
        for output, name in job.carried.items():
            request.set_tensor(output, tensor(written[name]))
        request.set_tensor("loss", tensor(loss))
        requests.append(request)

    def step(feed: Arrays) -> float:
        for name, array in feed.items():
            batch[name][...] = array
        requests[0].infer()
        requests.reverse()
        return float(loss)

    return step


def iree(job: Job, threads: int) -> Step:
    import iree.runtime as runtime

    tools, made = Path(sys.executable).parent, job.folder / "iree"
    _tool(tools / "iree-import-onnx", job.folder / "fixed.onnx", "-o", f"{made}.mlir", "--opset-version", "21")
    _tool(
        tools / "iree-compile", f"{made}.mlir", "-o", f"{made}.vmfb", "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=host",
    )  # fmt: skip
    runtime.flags.parse_flags(f"--task_topology_max_group_count={threads}")
    context = runtime.SystemContext(config=runtime.Config("local-task"))
    context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, Path(f"{made}.vmfb").read_bytes()))
    run = context.modules.module["main_graph"]
    current: dict[str, Any] = dict(job.initial)

    def step(feed: Arrays) -> float:
        values = {**current, **feed}
        results = dict(zip(job.outputs, run(*(values[name] for name in job.inputs))))
        # They stay where the engine has them.
        current.update({name: results[output] for output, name in job.carried.items()})
        return float(np.asarray(results["loss"]))

    return step


def _tool(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines()
        said = next((line for line in lines if "error:" in line), lines[-1] if lines else "no message")
        raise RuntimeError(f"{_operator_at(said)}{said.rpartition('error: ')[2]}")


def _operator_at(said: str) -> str:
    """The ONNX operator in the line of the file that a message of IREE is about."""
    place = re.match(r"(.*\.mlir):(\d+):", said)
    line = Path(place[1]).read_text().splitlines()[int(place[2]) - 1] if place else ""
    operator = re.search(r'"onnx\.(\w+)"', line)
    return f"{operator[1]}: " if operator else ""


def reference(job: Job, threads: int) -> Step:
    from onnx.reference import ReferenceEvaluator

    current: dict[str, Any] = dict(job.initial)
    try:
        session = ReferenceEvaluator(str(job.folder / "step.onnx"))
    except RuntimeError as error:
        if "Scan" not in str(error):
            raise
        print("plain", file=sys.stderr)
        session = ReferenceEvaluator(str(job.folder / "plain.onnx"))

    def step(feed: Arrays) -> float:
        answers = session.run(job.outputs, {**current, **feed})
        results = dict(zip(job.outputs, answers))
        current.update({name: results[output] for output, name in job.carried.items()})
        return float(results["loss"])

    return step


ENGINES = {"onnxruntime": onnxruntime, "native": native, "openvino": openvino, "iree": iree, "reference": reference}


def serve(engines: dict[str, Callable[[Job, int], Step]]) -> None:
    """Trains as the arguments say, then makes a step for each line that comes in."""
    answers = os.fdopen(int(sys.argv[4]), "w")
    job = Job(Path(sys.argv[2]))
    try:
        step = engines[sys.argv[1]](job, int(sys.argv[3]))
        losses = [step(job.feeds[i % len(job.feeds)]) for i in range(job.steps)]
    except Exception as error:  # noqa: BLE001  told to the parent, which says what stands in the way
        traceback.print_exc()
        print(
            json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}), file=answers, flush=True
        )
        return
    print(json.dumps({"losses": losses, "megabytes": _peak()}), file=answers, flush=True)
    for _ in sys.stdin:
        step(job.feeds[0])
        started, used = time.perf_counter(), time.process_time()
        step(job.feeds[0])
        taken, worked = time.perf_counter() - started, time.process_time() - used
        print(json.dumps({"milliseconds": taken * 1e3, "processor": worked * 1e3}), file=answers, flush=True)


def _peak() -> float:
    """Of this process. Not from getrusage, which starts with the peak of the process that started this one."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


if __name__ == "__main__":
    serve(ENGINES)
