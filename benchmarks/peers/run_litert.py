"""LiteRT as a peer, with its XNNPACK delegate; convert_litert.py makes its files."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from serve import serve


class Network:
    def __init__(self, path: str, threads: int) -> None:
        self._interpreter = Interpreter(model_path=path, num_threads=threads)
        self._interpreter.allocate_tensors()
        self._input = self._interpreter.get_input_details()[0]["index"]
        self._output = self._interpreter.get_output_details()[0]["index"]

    def prepare(self, x: np.ndarray) -> np.ndarray:
        """Channels last, as such a network gets its data."""
        return np.ascontiguousarray(np.moveaxis(x, 1, -1))

    def predict(self, x: np.ndarray) -> np.ndarray:
        interpreter = self._interpreter
        interpreter.set_tensor(self._input, x)
        interpreter.invoke()
        return interpreter.get_tensor(self._output)


class LiteRT:
    version = version("ai-edge-litert")

    def load(self, kind: str, files: dict[str, str], threads: int) -> Network:
        return Network(f"{files['folder']}/{kind}.tflite", threads)


serve(LiteRT())
