"""OpenVINO as a peer: reads ONNX; int8 by NNCF's post-training quantization with the same calibration examples."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import openvino as ov
from serve import serve


class Network:
    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._output = compiled.output(0)

    def prepare(self, x: np.ndarray) -> np.ndarray:
        return x

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self._request.infer(x, share_inputs=True)[self._output]

    def profile(self, x: np.ndarray) -> list[list[Any]]:
        """Microseconds of each node that ran, with its kernel; the median of 50 runs."""
        times: dict[str, list[float]] = {}
        kernels = {}
        for _ in range(50):
            self._request.infer(x)
            for node in self._request.get_profiling_info():
                if node.status.name == "EXECUTED":
                    times.setdefault(node.node_name, []).append(node.real_time.total_seconds() * 1e6)
                    kernels[node.node_name] = f"{node.node_type} {node.exec_type}"
        return [[kernels[name], float(np.median(spent))] for name, spent in times.items()]


class OpenVINO:
    version = ov.__version__.split("-")[0]

    def load(self, kind: str, files: dict[str, str], threads: int) -> Network:
        model = ov.Core().read_model(files["onnx"])
        if kind.startswith("int8"):
            import nncf

            nncf.set_log_level(logging.ERROR)
            calibration = np.load(files["calibration"])
            model = nncf.quantize(model, nncf.Dataset([x[None] for x in calibration]), subset_size=len(calibration))
        config = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            # The default takes bfloat16 where the processor has it; the others compute in float32.
            "INFERENCE_PRECISION_HINT": "f32",
            "PERF_COUNT": kind.endswith("profile"),
        }
        return Network(ov.compile_model(model, "CPU", config))


serve(OpenVINO())
