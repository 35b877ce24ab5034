"""Processes that train together, started as torchrun starts them, each running one script of the tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# The project, and what this process was given.
PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


def start_ranks(script: Path | str, count: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start `count` processes of a script, or of "-m" and a package, on one thread each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def run_ranks(script: Path, count: int, *arguments: str, seconds: float = 240) -> list[Any]:
    """What each process printed, as JSON, by rank. Fails with a process's errors if one does not end with 0."""
    running = start_ranks(script, count, *arguments)
    try:
        ended = [process.communicate(timeout=seconds) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    failed = [errors for process, (_, errors) in zip(running, ended) if process.returncode]
    assert not failed, "\n---\n".join(failed)
    return [json.loads(output) for output, _ in ended]
