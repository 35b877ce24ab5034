"""Starts the process of a Child: as a new Python, or forked from a Starter, which takes a tenth of the CPU time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from archipel.lite_runtime.confinement import START_PYTHON, package_roots

if TYPE_CHECKING:
    from archipel.lite_runtime.isolated.starter import Starter

_MAIN = """
from archipel.lite_runtime.isolated.child import main
main()
"""


class Process(Protocol):
    """What the parent does with the process. `wait` raises subprocess.TimeoutExpired."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Negative for a signal; None while it runs, and where nobody could see how it ended."""

    def wait(self, timeout: float | None = None) -> int | None: ...

    def kill(self) -> None: ...


class Ends:
    """A socket pair and a pipe: `ours` and `lifeline` for the parent, `theirs` and `watched` for the child.

    The parent keeps `lifeline` open until it ends, also by a kill; then the kernel tells the child.
    """

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        try:
            self.watched, self.lifeline = os.pipe()
        except OSError:
            self.close_ours()
            self.theirs.close()
            raise

    def close_theirs(self) -> None:
        """Once the child has its own: with these ends open here, the parent would never see that it has closed them."""
        self.theirs.close()
        os.close(self.watched)

    def close_ours(self) -> None:
        """Tell whoever has the other ends that the parent is gone."""
        self.ours.close()
        if hasattr(self, "lifeline"):
            os.close(self.lifeline)


class Started(NamedTuple):
    """A process, with the parent's ends of its socket and of the pipe whose closing ends it."""

    process: Process
    connection: socket.socket
    lifeline: int


def start(words: int, environment: Mapping[str, str], starter: Starter | None) -> Started:
    """Start a process that runs `child.run`, with the file descriptor `words` as its standard error.

    A starter's processes have no environment, so one that needs variables is started without it, and so is one that
    the starter cannot fork. Raises OSError.
    """
    if starter is not None and not environment:
        forked = starter.fork(words)
        if forked is not None:
            return forked
    ends = Ends()
    try:
        process = start_python(_MAIN, (ends.theirs.fileno(), ends.watched), words=words, environment=environment)
    except OSError:
        ends.close_ours()
        raise
    finally:
        ends.close_theirs()
    return Started(process, ends.ours, ends.lifeline)


def start_python(
    code: str,
    descriptors: tuple[int, ...],
    *arguments: str,
    words: int = subprocess.DEVNULL,
    environment: Mapping[str, str] = {},
) -> subprocess.Popen[bytes]:
    """A new Python that runs `code`; its arguments are the numbers of the `descriptors` that it gets, and `arguments`.

    It gets no other descriptors, and of the environment only `environment`. Raises OSError.
    """
    given = [package_roots(), *map(str, descriptors), *arguments]
    return subprocess.Popen(
        # The parent's own package, wherever that was imported from, and nothing from the working folder (-P).
        [sys.executable, "-P", "-c", START_PYTHON + code, *given],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=words,
        pass_fds=descriptors,
        env=environment,
        cwd="/",
        process_group=0,  # Ctrl-C is for the parent to handle
    )
