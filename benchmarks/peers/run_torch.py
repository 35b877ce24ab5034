"""PyTorch as a peer: eager and TorchScript, both in inference mode."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from serve import serve


class Network:
    def __init__(self, call: Any) -> None:
        self._call = call

    def prepare(self, x: np.ndarray) -> Any:
        return x

    def predict(self, x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self._call(torch.from_numpy(x)).numpy()


class PyTorch:
    version = torch.__version__

    def load(self, kind: str, files: dict[str, str], threads: int) -> Network:
        from archipel import models

        torch.set_num_threads(threads)
        network = getattr(models, files["make"])(0).eval()
        network.load_state_dict(torch.load(files["state"], weights_only=True))
        if kind == "jit":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                example = torch.from_numpy(np.load(files["inputs"])[:1])
                network = torch.jit.optimize_for_inference(torch.jit.trace(network, example))
        return Network(network)


serve(PyTorch())
