"""MNN as a peer, with its session interface; convert_mnn.py makes its files."""

from __future__ import annotations

import MNN
import numpy as np
from serve import serve


class Network:
    def __init__(self, path: str, threads: int) -> None:
        self._interpreter = MNN.Interpreter(path)
        self._session = self._interpreter.createSession(
            {"backend": "CPU", "numThread": threads, "precision": "high", "memory": "high"}
        )
        self._input = self._interpreter.getSessionInput(self._session)
        self._output = self._interpreter.getSessionOutput(self._session)
        self._shape = tuple(self._output.getShape())
        self._result = MNN.Tensor(
            self._shape, MNN.Halide_Type_Float, np.zeros(self._shape, np.float32), MNN.Tensor_DimensionType_Caffe
        )

    def prepare(self, x: np.ndarray) -> MNN.Tensor:
        return MNN.Tensor(x.shape, MNN.Halide_Type_Float, x, MNN.Tensor_DimensionType_Caffe)

    def predict(self, x: MNN.Tensor) -> np.ndarray:
        self._input.copyFrom(x)
        self._interpreter.runSession(self._session)
        self._output.copyToHostTensor(self._result)
        return np.array(self._result.getNumpyData()).reshape(self._shape)


class MobileNeuralNetwork:
    version = MNN.version()

    def load(self, kind: str, files: dict[str, str], threads: int) -> Network:
        return Network(f"{files['folder']}/{kind}.mnn", threads)


serve(MobileNeuralNetwork())
