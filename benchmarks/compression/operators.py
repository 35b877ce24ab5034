"""Where ONNX Runtime spends its time in a graph: microseconds by operator, from its own trace.

    python benchmarks/compression/operators.py MODEL.onnx ... [--threads 1]

Batch 1, zeros as input. Tracing costs some microseconds a node; what the call takes without it says how much, and that
is taken off evenly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import beside  # noqa: F401
import numpy as np
from lite_predict import in_process, raw_run, raw_session

CALLS = 300


def by_operator(path: Path, threads: int, calls: int = CALLS) -> list[tuple[str, float]]:
    """("Conv conv1", microseconds) of each node that runs, in the graph's order, and what is outside of them."""
    import onnx

    sizes = [d.dim_value or 1 for d in onnx.load(path).graph.input[0].type.tensor_type.shape.dim]
    x = np.zeros(sizes, np.float32)
    plain = in_process("plain", raw_run(raw_session(path, threads)), x)
    total = min(plain.seconds(calls) for _ in range(5)) * 1e6
    with tempfile.TemporaryDirectory(prefix="archipel-operators-") as folder:
        settings = {"enable_profiling": True, "profile_file_prefix": f"{folder}/trace"}
        session = raw_session(path, threads, **settings)
        predict = raw_run(session)
        for _ in range(calls):
            predict(x)
        events = json.loads(Path(session.end_profiling()).read_text())
    spent: dict[str, list[float]] = {}
    runs: list[float] = []
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = f"{event['args']['op_name']} {event['name'].removesuffix('_kernel_time')}"
            spent.setdefault(name, []).append(event["dur"])
        elif event["name"] == "model_run":
            runs.append(event["dur"])
    rows = [(name, statistics.fmean(sorted(times)[: calls * 4 // 5])) for name, times in spent.items()]
    extra = max(0.0, (sum(time for _, time in rows) - 0.9 * total) / len(rows))
    return [(name, max(0.0, time - extra)) for name, time in rows] + [("a call without the trace", total)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for path in options.models:
        print(path)
        for name, time in by_operator(path, options.threads):
            print(f"    {time:8.1f} us  {name}")


if __name__ == "__main__":
    main()
