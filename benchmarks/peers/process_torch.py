"""One process of PyTorch: python process_torch.py import | cold STATE X | fit STATE X Y THREADS

Prints one JSON object. The FedAvg CNN, as archipel/models/fedavg_cnn.py has it, with weights from a state_dict's file.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any


def imported() -> dict[str, float]:
    started = time.perf_counter()
    import torch  # noqa: F401

    return {"seconds": time.perf_counter() - started}


def network() -> Any:
    from torch import nn

    layers = OrderedDict(
        conv1=nn.Conv2d(1, 32, kernel_size=5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, kernel_size=5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        hidden=nn.Linear(64 * 7 * 7, 512),
        relu3=nn.ReLU(),
        output=nn.Linear(512, 10),
    )
    return nn.Sequential(layers)


def cold(state: str, x: str) -> dict[str, float]:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    example = torch.from_numpy(np.load(x)[:1])
    started = time.perf_counter()
    # The fastest way there is: no values are drawn that the file replaces, and the file is mapped.
    with torch.device("meta"):
        net = network().eval()
    net.load_state_dict(torch.load(state, weights_only=True, mmap=True), assign=True)
    with torch.inference_mode():
        net(example).numpy()
    return {"seconds": time.perf_counter() - started, "ready": time.time()}


def fit(state: str, x: str, y: str, threads: str) -> dict[str, float]:
    import numpy as np
    import torch

    torch.set_num_threads(int(threads))
    net = network().train()
    net.load_state_dict(torch.load(state, weights_only=True))
    inputs, labels = torch.from_numpy(np.load(x)), torch.from_numpy(np.load(y))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    started = time.perf_counter()
    for _ in range(2):
        order = torch.randperm(len(inputs))
        for at in range(0, len(inputs), 32):
            chosen = order[at : at + 32]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(inputs[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
    return {"seconds": time.perf_counter() - started, "rss": peak(), "loss": loss.item()}


def peak() -> float:
    """Peak resident memory in MB (2**20 bytes)."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024  # type: ignore[union-attr]


if __name__ == "__main__":
    mode = {"import": imported, "cold": cold, "fit": fit}[sys.argv[1]]
    print(json.dumps(mode(*sys.argv[2:])))
