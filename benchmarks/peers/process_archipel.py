"""One process of the device install: python process_archipel.py import | cold BUNDLE KEY X | fit BUNDLE KEY X Y THREADS

Prints one JSON object. Runs in an environment that has nothing but the device install.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path


def imported() -> dict[str, float]:
    started = time.perf_counter()
    import archipel.lite_runtime  # noqa: F401

    own = time.perf_counter() - started
    import onnxruntime  # noqa: F401

    return {"seconds": time.perf_counter() - started, "own": own}


def cold(bundle: str, key: str, x: str) -> dict[str, float]:
    import numpy as np
    import onnxruntime  # noqa: F401

    from archipel import lite_runtime as lite

    example = np.load(x)[:1]
    started = time.perf_counter()
    lite.load(bundle, [bytes.fromhex(key)]).predict(example)
    return {"seconds": time.perf_counter() - started, "ready": time.time()}


def fit(bundle: str, key: str, x: str, y: str, threads: str) -> dict[str, float]:
    import numpy as np

    from archipel import lite_runtime as lite

    runtime = lite.load(bundle, [bytes.fromhex(key)], threads=int(threads))
    started = time.perf_counter()
    history = runtime.fit(np.load(x), np.load(y), epochs=2, batch_size=32, hyperparameters={"lr": 0.01})
    return {"seconds": time.perf_counter() - started, "rss": peak(), "loss": history.losses[-1]}


def peak() -> float:
    """Peak resident memory in MB (2**20 bytes)."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024  # type: ignore[union-attr]


if __name__ == "__main__":
    mode = {"import": imported, "cold": cold, "fit": fit}[sys.argv[1]]
    print(json.dumps(mode(*sys.argv[2:])))
