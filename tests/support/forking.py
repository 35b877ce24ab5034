"""A process that forks, as in archipel.lite_runtime.isolated.forking, with children that run what a test says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from archipel.lite_runtime.confinement import START_PYTHON, package_roots
from archipel.lite_runtime.isolated.forking import ANSWER

_MAIN = """
import socket
from archipel.lite_runtime.isolated.forking import Forking
control = socket.socket(fileno=int(sys.argv.pop(1)))
before, code = sys.argv.pop(1), sys.argv.pop(1)
names = globals()
exec(before, names)
def run(connection, lifeline):
    exec(code, names | {"connection": connection, "lifeline": lifeline})
Forking(control, 60.0, run).serve()
"""


class Helper:
    """Its children run `code` with `arguments` in sys.argv[1:], their standard output is the helper's; the helper runs
    `before` once."""

    def __init__(self, code: str, *, before: str = "", arguments: Sequence[str] = (), folder: Path | str = "/") -> None:
        self.control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-c", START_PYTHON + _MAIN, package_roots(), str(theirs.fileno())]
        environment: Mapping[str, str] = {}
        self.process = subprocess.Popen(
            [*command, before, code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env=environment,
            cwd=folder,
            text=True,
        )
        theirs.close()
        # A child without the other ends of these would see its parent as gone.
        self._open: list[int] = []

    def __enter__(self) -> Helper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()
        # Not communicate(): a child that is left would keep it waiting.
        if self.process.stdout is not None:
            self.process.stdout.close()
        for descriptor in self._open:
            os.close(descriptor)

    def fork(self) -> tuple[int, int]:
        """The process id of a new child, and the pipe that will say how it ended."""
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        status, told = os.pipe()
        self._open += [ours.detach(), lifeline, status]
        try:
            socket.send_fds(self.control, [b"f"], [theirs.fileno(), watched, 2, told])
        finally:
            theirs.close()
            os.close(watched)
            os.close(told)
        return self.answer(), status

    def answer(self) -> int:
        answer, handles, _, _ = socket.recv_fds(self.control, ANSWER.size, 1)
        for handle in handles:
            os.close(handle)
        if not answer:
            raise EOFError
        pid: int = ANSWER.unpack(answer)[0]
        return pid

    def status(self, told: int) -> int:
        """What waitpid said of the child."""
        status: int = ANSWER.unpack(os.read(told, ANSWER.size))[0]
        return status

    def line(self) -> str:
        """The next line that a child prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def children(pid: int | None = None) -> list[int]:
    """Process ids of the children of this process, or of `pid`, zombies included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == (os.getpid() if pid is None else pid):
            found.append(int(path.parent.name))
    return found


def wait_until(what: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
