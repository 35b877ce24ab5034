"""The device agent as a process: python agent_run.py FOLDER SERVER [DATA.npz]. Its folder is enrolled already."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import numpy as np

from archipel.client import Agent, AgentConfig


def main(folder: str, server: str, data: str = "") -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def examples() -> dict[str, np.ndarray]:
        with np.load(data) as file:
            return dict(file)

    config = AgentConfig(folder=Path(folder), server=server, allow_plain=True)
    with Agent(config, examples=examples) as agent:
        agent.run_forever(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
