"""PyTorch as a peer: eager and frozen TorchScript, both in inference mode, images in the layout that is faster."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from serve import seconds, serve


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
        example = np.load(files["inputs"])[:1]
        layouts = [torch.contiguous_format, *([torch.channels_last] if example.ndim == 4 else [])]
        made = []
        for layout in layouts:
            network = getattr(models, files["make"])(0).eval()
            network.load_state_dict(torch.load(files["state"], weights_only=True))
            network = network.to(memory_format=layout)
            if kind == "jit":
                given = torch.from_numpy(example).contiguous(memory_format=layout)
                with warnings.catch_warnings(), torch.inference_mode():
                    warnings.simplefilter("ignore")
                    network = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(network, given)))
            made.append(Network(network, layout))
        return min(made, key=lambda each: seconds(each, each.prepare(example), 50))


serve(PyTorch())
