"""Runs a page of the documentation as its reader does: its files, its commands, its Python, from top to bottom."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from tests.support.pages import blocks, titles


def run_page(
    page: str,
    folder: Path,
    shell: dict[str, str],
    rounds: int | None = None,
    *,
    meanwhile: Mapping[str, Callable[[], AbstractContextManager[None]]] | None = None,
) -> str:
    """Shell blocks one by one; Python blocks share one process, as at a prompt; a block with a title is a file.

    Arguments:
        page: its path in the repository.
        folder: where its blocks run.
        shell: the environment of its commands.
        rounds: of the page's federations, in place of those that are written there.
        meanwhile: what a reader does while the shell block runs that contains a text.

    Returns what the blocks print.
    """
    acts = meanwhile or {}
    servers: list[tuple[subprocess.Popen[bytes], signal.Signals]] = []
    printed = ""
    python = subprocess.Popen(
        [sys.executable, "-u", "-i", "-q"], cwd=folder, env=shell, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        for (language, background, text), title in zip(blocks(page), titles(page)):
            if title:
                (folder / title).write_text(text)
                continue
            if language not in ("python", "sh"):
                continue
            if rounds is not None:
                text = re.sub(r"--rounds \d+", f"--rounds {rounds}", text)
            if language == "python":
                printed += run_python(python, text)
            elif background:
                server = subprocess.Popen(["bash", "-c", f"exec {text}"], cwd=folder, env=shell)
                # Ctrl-C is what ends `archipel up --stay`.
                servers.append((server, signal.SIGINT if " up " in text else signal.SIGTERM))
                wait_for_port(port_of(folder, text.split()))
            else:
                with ExitStack() as stack:
                    for act in [act for words, act in acts.items() if words in text]:
                        stack.enter_context(act())
                    done = subprocess.run(
                        ["bash", "-e", "-c", text], cwd=folder, env=shell, capture_output=True, text=True, check=False
                    )
                assert done.returncode == 0, done.stdout + done.stderr
                printed += done.stdout
        printed += run_python(python, "print('finished')")
    finally:
        python.kill()
        python.communicate()
        for server, end in servers:
            server.send_signal(end)
            assert server.wait(timeout=20) == 0
    assert "finished" in printed
    return printed


def port_of(folder: Path, words: list[str]) -> int:
    """That of the command `archipel serve start FOLDER`, or `archipel up` where it has run before."""
    if "--port" in words:
        return int(words[words.index("--port") + 1])
    server = "federation/server" if words[1] == "up" else words[3]
    return int(tomllib.loads((folder / server / "server.toml").read_text())["port"])


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
