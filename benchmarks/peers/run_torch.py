"""PyTorch as a peer, in inference mode: kinds "eager" and "jit" (frozen TorchScript), each also with ", channels_last".

A process has one kind at a time: kinds that share an allocator change each other's times.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from serve import serve


class Network:
    def __init__(self, call: Any, layout: torch.memory_format) -> None:
        self._call = call
        self._layout = layout

    def prepare(self, x: np.ndarray) -> Any:
        return torch.from_numpy(x).contiguous(memory_format=self._layout)

    def predict(self, x: Any) -> np.ndarray:
        with torch.inference_mode():
            return self._call(x).numpy()


class PyTorch:
    version = torch.__version__

    def load(self, kind: str, files: dict[str, str], threads: int) -> Network:
        from archipel import models

        torch.set_num_threads(threads)
        form, _, wanted = kind.partition(", ")
        layout = torch.channels_last if wanted == "channels_last" else torch.contiguous_format
        network = getattr(models, files["make"])(0).eval()
        network.load_state_dict(torch.load(files["state"], weights_only=True))
        network = network.to(memory_format=layout)
        if form == "jit":
            given = torch.from_numpy(np.load(files["inputs"])[:1]).contiguous(memory_format=layout)
            with warnings.catch_warnings(), torch.inference_mode():
                warnings.simplefilter("ignore")
                network = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(network, given)))
        return Network(network, layout)


serve(PyTorch())
