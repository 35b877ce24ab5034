"""Loads and uses bundles whose paths come on standard input, one a line, and prints what became of each.

"ok", or "refused NAME: TEXT" for an error that archipel documents. Anything else ends the process, which is what the
test looks for. The process's own memory is limited.
"""

from __future__ import annotations

import math
import resource
import sys
import warnings
from pathlib import Path

import numpy as np

from archipel.bundle.roles import Example, Label
from archipel.errors import ArchipelError
from archipel.lite_runtime import Runtime, load
from archipel.lite_runtime.evaluation import evaluation_fields

MEMORY = 1 << 30
"""Bytes of writable memory beside what the libraries take."""


def use(path: Path, keys: list[bytes], cache: Path) -> str:
    try:
        runtime = load(path, keys, cache=cache, memory_limit=64 << 20)
        data: dict[str, np.ndarray] = {}
        for program in sorted(runtime.bundle.manifest.programs.values(), key=lambda p: p.kind == "finish"):
            if program.repeats:
                continue  # it is run instead of the one that it repeats
            ports = evaluation_fields(runtime.bundle) if program.kind == "evaluate" else program.inputs
            shapes = {
                port: [dim if isinstance(dim, int) else 3 for dim in port.shape]
                for port in ports
                if isinstance(port, Example | Label)
            }
            # The caller has no use for more; the runtime itself must not allocate it.
            fields = {p.name: np.zeros(s, p.dtype) for p, s in shapes.items() if math.prod(s) < 1 << 20}
            data.update(fields)
            call(runtime, program.kind, data if program.kind == "finish" else fields)
        return "ok"
    except ArchipelError as error:
        return f"refused {type(error).__name__}: {str(error)[:200]!r}"


def call(runtime: Runtime, kind: str, fields: dict[str, np.ndarray]) -> None:
    if kind == "predict":
        runtime.predict(fields)
    elif kind == "evaluate":
        runtime.evaluate(fields)
    elif kind == "train":
        runtime.fit(fields, batch_size=3)
        runtime.parameters()
    elif kind == "finish":
        # As an agent does whose round has a deadline: a schedule may be long.
        runtime.local_round(fields, seed=1, callbacks=[lambda progress: progress.step == 99])


def main() -> None:
    key, cache = bytes.fromhex(sys.argv[1]), Path(sys.argv[2])
    import onnxruntime  # noqa: F401 - before the limit is set

    warnings.simplefilter("ignore", RuntimeWarning)
    used = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line).split()[1])
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        print(use(Path(line.rstrip("\n")), [key], cache), flush=True)


if __name__ == "__main__":
    main()
