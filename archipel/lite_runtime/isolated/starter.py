"""Keeps a process without secrets from which children are forked, as long as they are needed again and again.

Starting Python and importing NumPy and this package takes most of the CPU time of a short round. `forking.py` is that
process. It ends by itself when it is not needed, so a device that waits for a day spends no memory on it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from contextlib import ExitStack, suppress

from archipel.lite_runtime.isolated.forking import ANSWER
from archipel.lite_runtime.isolated.starting import Ends, Started, start_python

_MAIN = """
from archipel.lite_runtime.isolated.forking import main
main()
"""
_FORK_SECONDS = 120.0
_STATUS_SECONDS = 5.0
_END_SECONDS = 1.0


class Starter:
    """Forks processes for isolated runtimes; any thread may ask. It starts its helper process with the first one.

    `idle_seconds` after the last child's end the helper ends, and the next fork starts another. Linux 5.3.
    """

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._helper: _Helper | None = None

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        helper = self._helper
        return None if helper is None or helper.process.returncode is not None else helper.process.pid

    def fork(self, words: int) -> Started | None:
        """A process that runs `child.run`, with the descriptor `words` as its standard error; None if there is no way.

        A helper that has ended is replaced. Raises OSError if this process has no room for its ends.
        """
        if not hasattr(os, "pidfd_open"):
            return None
        with self._lock:
            # A fork of this process has a copy of the socket, and would take answers that are not for it.
            if self._helper is not None and self._helper.owner != os.getpid():
                self._end_helper()
            replaced = self._helper is None
            while True:
                try:
                    if self._helper is None:
                        self._helper = _Helper(self._idle_seconds)
                    return self._helper.fork(words)
                except _HelperLostError:
                    self._end_helper()
                    if replaced:
                        return None
                    replaced = True
                except OSError:
                    raise  # nothing was asked
                except BaseException:
                    # Its answer may still come, and the next request would take it for its own.
                    self._end_helper()
                    raise

    def close(self) -> None:
        """End the helper, and the children that still run. The next fork starts another."""
        with self._lock:
            self._end_helper()

    def _end_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()


class _HelperLostError(Exception):
    """The helper does not answer, or cannot be started."""


class _Helper:
    """The process, and the socket for requests to it."""

    def __init__(self, idle_seconds: float) -> None:
        self.owner = os.getpid()
        # One request is one packet; an empty one says that the other side has ended.
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        try:
            self.process = start_python(_MAIN, (theirs.fileno(),), repr(idle_seconds))
        except OSError as error:
            self._control.close()
            raise _HelperLostError from error
        finally:
            theirs.close()
        self._control.settimeout(_FORK_SECONDS)
        # It may end at any time, and would be a zombie until somebody waits for it.
        waiting = threading.Thread(target=self.process.wait, name="archipel-starter", daemon=True)
        waiting.start()
        self.end = weakref.finalize(self, _end, self._control, self.process, waiting, self.owner)

    def fork(self, words: int) -> Started | None:
        """A process, or None if the helper cannot make one. Raises _HelperLostError; whatever it forked then ends."""
        with ExitStack() as failed:
            ends = Ends()
            failed.callback(ends.close_ours)
            try:
                status, told = os.pipe()
                failed.callback(os.close, status)
                try:
                    answer, handles = self._ask([ends.theirs.fileno(), ends.watched, words, told])
                finally:
                    os.close(told)
            finally:
                ends.close_theirs()
            if answer < 0 or not handles:
                return None
            failed.pop_all()
        return Started(Forked(answer, handles[0], status), ends.ours, ends.lifeline)

    def _ask(self, given: list[int]) -> tuple[int, list[int]]:
        try:
            socket.send_fds(self._control, [b"f"], given)
            answer, handles, _, _ = socket.recv_fds(self._control, ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise _HelperLostError from error
        if len(answer) != ANSWER.size:
            raise _HelperLostError
        return ANSWER.unpack(answer)[0], handles


def _end(control: socket.socket, process: subprocess.Popen[bytes], waiting: threading.Thread, owner: int) -> None:
    # The helper ends its children when it sees this, and then itself.
    control.close()
    if os.getpid() == owner:
        waiting.join(_END_SECONDS)
        if waiting.is_alive():
            process.kill()
            waiting.join()


class Forked:
    """A process that is the child of a helper: a pidfd says when it has ended, and a pipe, `status`, how."""

    def __init__(self, pid: int, handle: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle
        self._status = status

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, negative for a signal; None if the helper died before it could tell.

        Raises subprocess.TimeoutExpired after `timeout` seconds.
        """
        if self._handle < 0:
            return self.returncode
        if not _readable(self._handle, timeout):
            raise subprocess.TimeoutExpired("the isolated process", timeout or 0)
        told = os.read(self._status, ANSWER.size) if _readable(self._status, _STATUS_SECONDS) else b""
        if len(told) == ANSWER.size:
            self.returncode = os.waitstatus_to_exitcode(*ANSWER.unpack(told))
        else:
            # The first process of a container inherits the children of others, and has to wait for them.
            with suppress(ChildProcessError):
                self.returncode = _exit_code(os.waitid(os.P_PIDFD, self._handle, os.WEXITED))
        os.close(self._handle)
        os.close(self._status)
        self._handle = -1
        return self.returncode

    def kill(self) -> None:
        """End it, if it still runs."""
        if self._handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _readable(descriptor: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1e3))


def _exit_code(result: os.waitid_result | None) -> int | None:
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
