"""A training step in ExecuTorch's training extension, by its operators on the processor and its SGD.

Delegates such as XNNPACK take no weights that change and have no operators of gradients.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from executorch.extension.training import _load_for_executorch_for_training, get_sgd_optimizer
from train_steps import Arrays, Job, Step, serve


def train(job: Job, threads: int) -> Step:
    torch.set_num_threads(threads)
    file = job.folder / "train.pte"
    if not file.exists():
        # In a process of its own, whose memory does not count.
        script = Path(__file__).with_name("convert_executorch.py")
        subprocess.run([sys.executable, script, job.folder / "train.pt2", file], check=True)
    module = _load_for_executorch_for_training(str(file))
    optimizer = None

    def step(feed: Arrays) -> float:
        nonlocal optimizer
        x, y = (torch.from_numpy(np.ascontiguousarray(array)) for array in feed.values())
        loss = module.forward_backward("forward", (x, y))[0]
        if optimizer is None:
            # Parameters are known after the first pass.
            optimizer = get_sgd_optimizer(module.named_parameters(), job.rate, job.momentum, 0.0, 0.0, False)
        optimizer.step(module.named_gradients())
        return float(loss)

    return step


if __name__ == "__main__":
    serve({"executorch": train})
