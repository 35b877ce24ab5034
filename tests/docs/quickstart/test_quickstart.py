"""Every code block of docs/quickstart.md and docs/by-hand.md runs: federations in three commands, and step by step."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.support.pages import blocks


@pytest.mark.parametrize("rounds", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_quickstart(rounds: int, tmp_path: Path, shell: dict[str, str]) -> None:
    """As it is written in the long suite; in the short one its two federations have fewer rounds."""
    started = time.monotonic()
    printed = run_page("docs/quickstart.md", tmp_path, shell, rounds)
    assert printed.count(f"round {rounds} of {rounds}: 8 devices") == 2
    assert printed.count("float32[5, 3]") == 2  # predictions of the bundle and of its int8 form
    for made in ("shapes/federation", "mine"):
        assert (tmp_path / made / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "trained.onnx").is_file()
    assert time.monotonic() - started < 600


@pytest.mark.slow
def test_by_hand(tmp_path: Path, shell: dict[str, str]) -> None:
    assert "completed 2 rounds" in run_page("docs/by-hand.md", tmp_path, shell)


def run_page(page: str, folder: Path, shell: dict[str, str], rounds: int | None = None) -> str:
    """Shell blocks one by one; Python blocks up to the next shell block share one process, as at a prompt.

    `rounds`: of the page's federations, in place of those that are written there. Returns what the blocks print.
    """
    servers: list[subprocess.Popen[bytes]] = []
    printed = ""
    python = subprocess.Popen(
        [sys.executable, "-u", "-i", "-q"], cwd=folder, env=shell, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        for language, background, text in blocks(page):
            if rounds is not None:
                text = re.sub(r"--rounds \d+", f"--rounds {rounds}", text)
            if language == "python":
                printed += run_python(python, text)
            elif background:
                servers.append(subprocess.Popen(["bash", "-c", f"exec {text}"], cwd=folder, env=shell))
                wait_for_port(port_of(folder, text.split()))
            else:
                done = subprocess.run(
                    ["bash", "-e", "-c", text], cwd=folder, env=shell, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, done.stderr
                printed += done.stdout
        printed += run_python(python, "print('finished')")
    finally:
        python.kill()
        python.communicate()
        for server in servers:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=20) == 0
    assert "finished" in printed
    return printed


def port_of(folder: Path, words: list[str]) -> int:
    """That of the command `archipel serve start FOLDER`."""
    if "--port" in words:
        return int(words[words.index("--port") + 1])
    return int(tomllib.loads((folder / words[3] / "server.toml").read_text())["port"])


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


def run_python(python: subprocess.Popen[str], text: str) -> str:
    """Run a block in the interpreter and fail where it raises. Returns what it printed."""
    assert python.stdin is not None
    assert python.stdout is not None
    python.stdin.write(f"exec({text!r})\nprint('=' * 8 + 'done')\n")
    python.stdin.flush()
    printed = ""
    for line in python.stdout:
        printed += line
        if "========done" in line:
            break
    assert "Traceback" not in printed, printed
    return printed
