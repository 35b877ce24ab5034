"""What `archipel bench` runs in fresh processes: a JSON request on standard input, a JSON answer on standard output.

Nothing is imported before it is timed, and nothing that a device does not need.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipel.lite_runtime import ModelRuntime

# Before every other import: the moment at which Python itself has started.
STARTED = time.monotonic_ns()


def main() -> None:
    import json
    from pathlib import Path

    request = json.loads(sys.stdin.read())
    before = time.monotonic_ns()
    import numpy as np

    from archipel import lite_runtime

    imported = time.monotonic_ns()
    feed = {name: np.load(Path(request["data"]) / f"{index}.npy") for index, name in enumerate(request["fields"])}
    reading = time.monotonic_ns()
    runtime = lite_runtime.load(
        request["bundle"],
        [bytes.fromhex(key) for key in request["keys"]],
        threads=request["threads"],
        delegates=request["delegates"] or "auto",
        cache=request["cache"],
        allow_development=True,
    )
    loaded = time.monotonic_ns()
    answer = (_train if request["train"] else _predict)(runtime, feed, request)
    print(
        json.dumps(
            {
                **answer,
                "start_ms": (STARTED - request["spawned_ns"]) / 1e6,
                "import_ms": (imported - before) / 1e6,
                "load_ms": (loaded - reading) / 1e6,
                "peak_bytes": peak_bytes(),
            }
        )
    )


def _predict(runtime: ModelRuntime, feed: dict[str, Any], request: dict[str, Any]) -> dict[str, object]:
    # A caller passes one array where the model has one field and one output; that is the shorter way through `predict`.
    x = next(iter(feed.values())) if request["single"] else feed
    started = time.perf_counter_ns()
    # The first call makes the session and allocates, so it counts as cold start and not as a call.
    runtime.predict(x)
    first = time.perf_counter_ns()
    cpu = time.process_time()
    deadline = first + int(request["seconds"] * 1e9)
    calls: list[float] = []
    # One clock reading ends a call and begins the next one.
    before = time.perf_counter_ns()
    while before < deadline or len(calls) < request["least"]:
        runtime.predict(x)
        after = time.perf_counter_ns()
        calls.append((after - before) / 1e3)
        before = after
    return {"first_ms": (first - started) / 1e6, "calls_us": calls, "cpu_s": time.process_time() - cpu}


def _train(runtime: ModelRuntime, feed: dict[str, Any], request: dict[str, Any]) -> dict[str, object]:
    moments: list[int] = []
    cpu = 0.0

    # A step is the time between two callbacks. The first callback comes after the session was made: cold start.
    def on_step(progress: object) -> bool:
        nonlocal cpu
        if not moments:
            cpu = time.process_time()
        moments.append(time.perf_counter_ns())
        passed = moments[-1] - moments[0]
        return bool(passed >= request["seconds"] * 1e9 and len(moments) > request["least"])

    started = time.perf_counter_ns()
    # As many epochs as it takes: `on_step` returns True, which stops the fit, when the time is over.
    runtime.fit(feed, epochs=1_000_000, batch_size=request["batch"], shuffle=False, callbacks=[on_step])
    return {
        "first_ms": (moments[0] - started) / 1e6,
        "calls_us": [(after - before) / 1e3 for before, after in pairwise(moments)],
        "cpu_s": time.process_time() - cpu,
    }


def peak_bytes() -> int:
    """The most resident memory that this process has had, in bytes."""
    # Not ru_maxrss where it can be helped: Linux hands that on to the child, so it may be the parent's peak.
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except OSError:
        import resource

        # Bytes on macOS, kibibytes elsewhere.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
