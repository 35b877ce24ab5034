"""The process that measures a graph: reads a request from standard input, and writes what it found as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from archipel.errors import ArchipelError
from archipel.insight.times import Kernel, Measured
from archipel.lite_runtime.profile import profile_graph


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to measure; the inputs lie in `folder` as 0.npy, 1.npy, and have these names."""

    file: str
    folder: str
    names: list[str]
    runs: int
    threads: int


def main() -> None:
    """Answer the request on standard input."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    feed = {name: np.load(Path(asked.folder) / f"{place}.npy") for place, name in enumerate(asked.names)}
    try:
        found = profile_graph(Path(asked.file), feed, asked.runs, asked.threads)
    except ArchipelError as error:
        answer = Measured(error=str(error))
    else:
        rows = [
            Kernel(node=row.node, op_type=row.op_type, calls=row.calls, us=row.us, share=row.share)
            for row in found.rows
        ]
        answer = Measured(kernels=rows, wall_us=found.wall_us)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
