"""Flower for the agent's benchmark: a SuperLink, a SuperNode and runs of peers/flower_app.py, all on loopback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_process import free_port, wait_for
from lite_peers import HERE, PeerError, clean_environment, install, python_of

ENVIRONMENT = "flower"
PACKAGES = ("flwr==1.41.0", "torch==2.13.0", "numpy")
PEER = "Flower"
FIRST_REQUEST, FIRST_PULL = b"POST /v1/fleet/", b"POST /v1/fleet/pull-messages"

_PROJECT = """[project]
name = "bench"
version = "1.0.0"
description = "The peer of a benchmark."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "flower_app:server"
clientapp = "flower_app:client"
[tool.flwr.app.config]
"""


def install_flower(folder: Path) -> Path:
    return install(folder, ENVIRONMENT, PACKAGES)


class Flower:
    """Flower's processes; what they say is in `folder`/*.log. Raises PeerError where flwr is not installed."""

    def __init__(self, peers: Path, folder: Path) -> None:
        self._programs = python_of(peers, ENVIRONMENT, "benchmarks/agent.py").parent
        self._folder = folder
        folder.mkdir()
        self.port = free_port()
        (folder / "config.toml").write_text(
            f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        path = f"{self._programs}{os.pathsep}{os.environ.get('PATH', '')}"
        # Nothing is reported to Flower's makers, and nothing is looked for in the home folder.
        ours = {"PATH": path, "FLWR_HOME": str(folder), "HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0"}
        self._environment = clean_environment() | ours
        self._runs = 0

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The SuperLink, until the block ends."""
        arguments = ["--insecure", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        with self._process("flower-superlink", *arguments):
            log = self._folder / "flower-superlink.log"
            wait_for(lambda: "Uvicorn running" in log.read_text(), f"SuperLink, see {log}", 60)
            yield

    @contextmanager
    def node(self, port: int) -> Iterator[int]:
        """A SuperNode that is connected to that port; its process id."""
        superlink = f"127.0.0.1:{port}"
        arguments = ["--insecure", "--superlink", superlink, "--port", str(free_port())]
        with self._process("flower-supernode", *arguments) as pid:
            yield pid

    def run(self, rounds: int, entries: int = 0, network: str = "", data: str = "") -> list[dict[str, float]]:
        """So many rounds with one node; what the app marked, see peers/flower_app.py. Raises PeerError."""
        self._runs += 1
        app = self._folder / f"app-{self._runs}"
        app.mkdir()
        marks = app.with_suffix(".marks")
        settings: dict[str, Any] = {
            "network": network, "entries": entries, "rounds": rounds, "data": data, "marks": str(marks),
        }  # fmt: skip
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
        (app / "pyproject.toml").write_text(_PROJECT + "".join(lines))
        (app / "flower_app.py").write_bytes((HERE / "flower_app.py").read_bytes())
        command = [self._programs / "flwr", "run", str(app), "bench"]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
        if done.returncode:
            raise PeerError(f"flwr run: {' '.join((done.stdout + done.stderr).split())[-300:]}")

        def marked() -> list[dict[str, float]]:
            return [json.loads(line) for line in marks.read_text().splitlines()] if marks.exists() else []

        wait_for(lambda: any("ended" in mark for mark in marked()), f"Flower's run, see {self._folder}", 300)
        return marked()

    @contextmanager
    def _process(self, program: str, *arguments: str) -> Iterator[int]:
        with (self._folder / f"{program}.log").open("w") as log:
            process = subprocess.Popen(
                [self._programs / program, *arguments], stdout=log, stderr=log, env=self._environment
            )
            try:
                yield process.pid
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
