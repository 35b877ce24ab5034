"""The child process of an IsolatedRuntime: starts it, ends it, and keeps its last words.

The child gets only those environment variables that a delegate's driver needs: others hold passwords, or change what
libraries load. It has a working folder of its own. Its arguments say where Python finds the packages.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import weakref
from typing import BinaryIO

import msgspec

from archipel.bundle import Bundle
from archipel.engine_registry import ENGINES
from archipel.errors import RuntimeProgramError
from archipel.lite_runtime.confinement import START_PYTHON, Scratch, asked_for, needs_of, package_roots
from archipel.lite_runtime.engines.delegates import Delegates, engines
from archipel.lite_runtime.isolated.messages import Channel, Open

FIXED_BYTES = 16 << 20
"""The memory of the runtime itself, beside the model: sessions, their arenas' first pieces, Python's own objects."""
LAST_WORDS = 600
_STACK_BYTES = 8 << 20
_MAIN = """
from archipel.lite_runtime.isolated.child import main
main()
"""


class Child:
    """One process with its socket, a pipe whose closing ends it, and a file for its standard error."""

    def __init__(self, request: Open, max_reply: int) -> None:
        try:
            scratch = Scratch()
        except OSError as error:
            raise RuntimeProgramError(
                f"isolated: no folder for the process can be made in {tempfile.gettempdir()} ({error.strerror}); free "
                "some space, or set TMPDIR to another folder"
            ) from None
        request = msgspec.structs.replace(request, scratch=str(scratch.path))
        # The parent keeps `lifeline` open until it ends, also by a kill; then the kernel tells the child.
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        words = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        allowed = needs_of(asked_for(request.delegates)).environment
        try:
            self.process = subprocess.Popen(
                # The parent's own package, wherever that was imported from, and nothing from the working folder (-P).
                [sys.executable, "-P", "-c", START_PYTHON + _MAIN, package_roots(), str(theirs.fileno()), str(watched)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs.fileno(), watched),
                env={name: value for name in allowed if (value := os.environ.get(name)) is not None},
                cwd=scratch.path,
                process_group=0,  # Ctrl-C is for the parent to handle
            )
        except OSError as error:
            ours.close()
            os.close(lifeline)
            words.close()
            scratch.remove()
            raise RuntimeProgramError(f"isolated: {sys.executable} cannot be started ({error.strerror})") from None
        finally:
            # With these ends open here, the parent would never see that the child has closed its own.
            theirs.close()
            os.close(watched)
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

    def end(self) -> int:
        """End the process if it still runs. Returns its exit code, negative for a signal."""
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


def _end(
    process: subprocess.Popen[bytes], channel: Channel, lifeline: int, words: BinaryIO, scratch: Scratch, owner: int
) -> None:
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
