"""Every code block of docs/quickstart.md runs: a whole federation by hand."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.support.pages import blocks


def test_quickstart(tmp_path: Path, shell: dict[str, str]) -> None:
    """Shell blocks one by one; Python blocks up to the next shell block share one process, as at a prompt."""
    servers: list[subprocess.Popen[bytes]] = []
    python = subprocess.Popen(
        [sys.executable, "-u", "-i", "-q"], cwd=tmp_path, env=shell, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        for language, background, text in blocks("docs/quickstart.md"):
            if language == "python":
                run_python(python, text)
            elif background:
                servers.append(subprocess.Popen(["bash", "-c", f"exec {text}"], cwd=tmp_path, env=shell))
                wait_for_port(int(text.rpartition("--port ")[2].split()[0]))
            else:
                done = subprocess.run(
                    ["bash", "-e", "-c", text], cwd=tmp_path, env=shell, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, done.stderr
        outcome = run_python(python, "print('finished')")
    finally:
        python.kill()
        python.communicate()
        for server in servers:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=20) == 0
    assert "completed 2 rounds" in outcome
    assert "finished" in outcome


def wait_for_port(port: int) -> None:
    """Until somebody listens there, as a reader waits for the server's line."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, port
            time.sleep(0.05)


OUTPUT: list[str] = []


def run_python(python: subprocess.Popen[str], text: str) -> str:
    """Run a block in the interpreter and fail where it raises. Returns all that was printed so far."""
    assert python.stdin is not None
    assert python.stdout is not None
    python.stdin.write(f"exec({text!r})\nprint('=' * 8 + 'done')\n")
    python.stdin.flush()
    for line in python.stdout:
        OUTPUT.append(line)
        if "========done" in line:
            break
    printed = "".join(OUTPUT)
    assert "Traceback" not in printed, printed
    return printed
