"""The process from which a Starter's children are forked. It imports what they need, and then only forks.

It is a Python of its own, so it has nothing of the agent's memory. It never reads a bundle, an example, or a byte of
what its children are sent: it passes their ends of sockets on, and keeps none. So a child gets by the fork what the
child of a new Python has, and the numbers of the processes that were forked before it. ONNX Runtime is not imported
here: that starts a thread, and it has to come after the confinement.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from archipel.lite_runtime.confinement import libraries

GIVEN = 4
"""Descriptors in a request: the child's socket, its end of the lifeline, its standard error, and a pipe to which this
process writes how the child ended."""
ANSWER = struct.Struct("<i")
"""A process id, which comes with its pidfd, or a negative error number; on the pipe, a status as of waitpid(2)."""
MOST_FORKS = 50
"""All children of one process have libraries at the same addresses, so it is replaced after so many of them."""


Run = Callable[[int, int], None]
"""What a child does with its socket and its end of the lifeline: `child.run`."""


class Forking:
    """Forks a child, which calls `run`, for each request on `control`. It ends with the other side of `control`, after
    `idle_seconds` without children, and once MOST_FORKS have ended."""

    def __init__(self, control: socket.socket, idle_seconds: float, run: Run) -> None:
        self._control = control
        self._idle_milliseconds = idle_seconds * 1e3
        self._run = run
        # By pidfd: the process id, and the pipe for its status.
        self._children: dict[int, tuple[int, int]] = {}
        self._forks = 0
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Answer requests until this process has to end. Children that still run then are killed."""
        while self._children or self._forks < MOST_FORKS:
            ready = self._poll.poll(None if self._children else self._idle_milliseconds)
            if not ready and not self._children:
                return
            for descriptor, _ in ready:
                if descriptor != self._control.fileno():
                    self._settle(descriptor)
                elif not self._answer():
                    # A child that was taken over may ignore the signal with which the lifeline ends it.
                    for pid, _ in self._children.values():
                        os.kill(pid, signal.SIGKILL)
                    return

    def _answer(self) -> bool:
        """Fork for the next request. Returns False if the other side is gone."""
        try:
            request, given, _, _ = socket.recv_fds(self._control, 1, GIVEN)
            if not request:
                return False
            try:
                pid, handle = self._fork(given)
            except OSError as error:
                self._control.send(ANSWER.pack(-(error.errno or errno.EAGAIN)))
            else:
                socket.send_fds(self._control, [ANSWER.pack(pid)], [handle])
        except ConnectionError:
            return False
        return True

    def _fork(self, given: list[int]) -> tuple[int, int]:
        """The child's process id and pidfd. Closes the descriptors `given`, but the pipe. Raises OSError."""
        try:
            if len(given) != GIVEN:
                # The kernel leaves out descriptors for which this process has no room.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = os.fork()
            if pid == 0:
                _become_child(given, self._run)
            self._forks += 1
            try:
                # Nobody has waited for the child yet, so no other process can have this number.
                handle = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            self._children[handle] = pid, given.pop()
            self._poll.register(handle, select.POLLIN)
            return pid, handle
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _settle(self, handle: int) -> None:
        """Tell how a child ended."""
        pid, pipe = self._children.pop(handle)
        self._poll.unregister(handle)
        _, status = os.waitpid(pid, 0)
        os.close(handle)
        # Nobody may ask any more.
        with suppress(BrokenPipeError):
            os.write(pipe, ANSWER.pack(status))
        os.close(pipe)


def _become_child(given: Sequence[int], run: Run) -> NoReturn:
    """In the child: keep of the process that it was forked from nothing but the imports, and run."""
    code = 1
    try:
        connection, lifeline, words, _ = given
        os.setpgid(0, 0)
        os.dup2(words, 2)
        # Above all the control socket, and the pipes of other children.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in (connection, lifeline):
                with suppress(OSError):  # the one that listdir had open
                    os.close(descriptor)
        # Or all children would draw the same numbers. The module `random` sees to that by itself.
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        run(connection, lifeline)
        code = 0
    except BaseException:  # noqa: BLE001  (nothing may go back into the loop of the process it was forked from)
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Serve the socket whose descriptor is the first argument; the second says for how many seconds without work."""
    from archipel.lite_runtime.isolated import child

    with socket.socket(fileno=int(sys.argv[1])) as control:
        # What this imports and looks up is the same for every child.
        libraries()
        # Children share the pages of all objects that are here now, unless the collector writes to them.
        gc.collect()
        gc.freeze()
        Forking(control, float(sys.argv[2]), child.run).serve()
    os._exit(0)
