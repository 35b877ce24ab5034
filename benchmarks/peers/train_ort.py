"""A training step in ONNX Runtime Training, which ended with release 1.19: its artifacts of a graph, plain SGD."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

# Its package imports PyTorch for parts that are not about devices; what is used here works without.
_package = types.ModuleType("onnxruntime.training")
_package.__path__ = [str(Path(ort.__file__).parent / "training")]
sys.modules[_package.__name__] = _package

from onnxruntime.training import artifacts  # noqa: E402
from onnxruntime.training.api import CheckpointState, Module, Optimizer  # noqa: E402
from train_steps import Arrays, Job, Step, serve  # noqa: E402


def train(job: Job, threads: int) -> Step:
    if job.momentum:
        raise ValueError("its SGD has no momentum")
    ort.set_default_logger_severity(3)
    forward = onnx.load(job.folder / "forward.onnx")
    names = [value.name for value in forward.graph.initializer]
    weights = {name for name in job.weights if ".running_" not in name}
    trained = [name for name in names if name.removeprefix("net.") in weights]
    artifacts.generate_artifacts(
        forward,
        requires_grad=trained,
        frozen_params=[name for name in names if ".running_" in name],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=job.folder,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    state = CheckpointState.load_checkpoint(str(job.folder / "checkpoint"))
    module = Module(str(job.folder / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(job.folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(job.rate)

    def step(feed: Arrays) -> float:
        x, y = feed.values()
        loss = module(x, np.ravel(y))
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


if __name__ == "__main__":
    serve({"ort": train})
