"""The child process of an IsolatedRuntime: has it started, ends it, and keeps its last words.

The child gets only those environment variables that a delegate's driver needs: others hold passwords, or change what
libraries load. It has a working folder of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import weakref
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from archipel.bundle import Bundle
from archipel.engine_registry import ENGINES
from archipel.errors import RuntimeProgramError
from archipel.lite_runtime.confinement import Scratch, asked_for, needs_of
from archipel.lite_runtime.engines.delegates import Delegates, engines
from archipel.lite_runtime.isolated.messages import Channel, Open
from archipel.lite_runtime.isolated.starting import Process, start

if TYPE_CHECKING:
    from archipel.lite_runtime.isolated.starter import Starter

FIXED_BYTES = 16 << 20
"""The memory of the runtime itself, beside the model: sessions, their arenas' first pieces, Python's own objects."""
LAST_WORDS = 600
_STACK_BYTES = 8 << 20


class Child:
    """One process with its socket, a pipe whose closing ends it, and a file for its standard error."""

    def __init__(self, request: Open, max_reply: int, starter: Starter | None = None) -> None:
        try:
            scratch = Scratch()
        except OSError as error:
            raise RuntimeProgramError(
                f"isolated: no folder for the process can be made in {tempfile.gettempdir()} ({error.strerror}); free "
                "some space, or set TMPDIR to another folder"
            ) from None
        request = msgspec.structs.replace(request, scratch=str(scratch.path))
        words = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        allowed = needs_of(asked_for(request.delegates)).environment
        environment = {name: value for name in allowed if (value := os.environ.get(name)) is not None}
        try:
            self.process, ours, lifeline = start(words.fileno(), environment, starter)
        except OSError as error:
            words.close()
            scratch.remove()
            raise RuntimeProgramError(f"isolated: {sys.executable} cannot be started ({error.strerror})") from None
        self.opened = False
        self.last_words = ""
        self.channel = Channel(ours, max_reply)
        self._words = words
        self._end = weakref.finalize(self, _end, self.process, self.channel, lifeline, words, scratch, os.getpid())
        try:
            self.channel.send(request)
        except OSError:
            # The process is gone already; the first request explains why.
            self.opened = False

    def end(self) -> int | None:
        """End the process if it still runs.

        Returns its exit code, negative for a signal; None if the starter's helper, which sees it, has died too.
        """
        if self._end.alive:
            try:
                # A process that dies closes its socket a moment before it can be waited for.
                self.process.wait(2.0 if self.channel.has_hung_up() else 0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            # Read before _end closes the file.
            self.last_words = _tail(self._words)
            self._end()
        return self.process.returncode


def _end(process: Process, channel: Channel, lifeline: int, words: BinaryIO, scratch: Scratch, owner: int) -> None:
    channel.close()
    os.close(lifeline)
    words.close()
    if os.getpid() == owner:
        # A fork of the parent has copies of all of these and must not end the parent's child.
        process.kill()
        process.wait()
    scratch.remove()


def _tail(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LAST_WORDS))
    return " ".join(file.read(LAST_WORDS).decode(errors="replace").split())


def fixed_bytes(bundle: Bundle, threads: int, delegates: Delegates = "auto") -> int:
    """The runtime's memory for any model: FIXED_BYTES, and a stack for each thread that a session adds.

    For a delegate that is an engine of its own, what it takes itself and for every program, too.
    """
    count = threads if threads > 0 else os.cpu_count() or 1
    import resource

    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack_bytes = _STACK_BYTES if stack == resource.RLIM_INFINITY else stack
    # After training, predict gets a new session while an answer may still come from the old one.
    # Each session starts count - 1 threads. A stack counts as a whole, with 64 KiB for its bookkeeping.
    sessions = len(bundle.manifest.programs) + 2
    total = FIXED_BYTES + sessions * (count - 1) * (stack_bytes + (64 << 10))
    for engine in map(ENGINES.__getitem__, engines(delegates)):
        total += engine.fixed_bytes + sessions * (engine.session_bytes + 2 * (count + 1) * stack_bytes)
    return total
