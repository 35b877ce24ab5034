"""`archipel serve start` as a process, for tests that kill it or talk to it over TCP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

SERVE = """
import sys
from archipel.errors import ArchipelError
from archipel.server import load_settings, supervise
try:
    supervise(load_settings(sys.argv[1], port=int(sys.argv[2])))
except ArchipelError as error:
    sys.exit(f"Error: {error}")
"""


class Server:
    """`supervise` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str]
        """The last one that was started."""
        self.url = ""

    def start(self, port: int = 0, **settings: str) -> str:
        """Returns its URL. `settings` are given to it by environment variables."""
        environment = os.environ | {"ARCHIPEL_SERVER_RETRY_AFTER": "0.02", "ARCHIPEL_SERVER_CHECK_IN_WINDOW": "5"}
        environment |= {f"ARCHIPEL_SERVER_{name.upper()}": value for name, value in settings.items()}
        process = self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.folder), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"archipel server on (https?://127\.0\.0\.1:\d+)\n", line)
        assert found, (line, process.stderr.read(), (self.folder / "server.log").read_text())
        self.url = found[1]
        return self.url

    @property
    def alive(self) -> bool:
        return hasattr(self, "process") and self.process.poll() is None

    def children(self) -> dict[str, int]:
        """Process ids by what they are, all descendants of the supervisor."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                parts = path.read_bytes().split(b"\0")
                command = (path.parent / "cmdline").read_bytes()
                parent = int((path.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            if f"ARCHIPEL_DATA_FOLDER={self.folder}".encode() not in parts:
                continue
            if b"coordinator_process" in command:
                found["coordinator"] = int(path.parent.name)
            elif parent == self.process.pid:
                found["gunicorn"] = int(path.parent.name)
            else:
                found["worker"] = int(path.parent.name)
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = int(self.process.wait(20))
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code
