"""Sends requests to the child process of an IsolatedRuntime, one at a time, and explains its errors and its end."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from archipel import errors
from archipel.errors import ArchipelError, RuntimeInputError, RuntimeLimitError, RuntimeProgramError
from archipel.lite_runtime.confinement import Confinement
from archipel.lite_runtime.isolated.checkpoints import keep_checkpoint
from archipel.lite_runtime.isolated.messages import (
    Arrays,
    Between,
    Done,
    Failed,
    KeepCheckpoint,
    Learn,
    Open,
    Opened,
    Proceed,
    Reply,
    Report,
    Request,
    WriteCheckpoint,
)
from archipel.lite_runtime.isolated.process import LAST_WORDS, Child
from archipel.lite_runtime.training.calls import Hooks
from archipel.lite_runtime.training.checkpoint import CheckpointFile
from archipel.lite_runtime.training.results import Progress

if TYPE_CHECKING:
    from archipel.lite_runtime.isolated.starter import Starter

_START_SECONDS = 120.0
NO_HOOKS = Hooks()
_OUT_OF_MEMORY = re.compile(r"bad_alloc|MemoryError|cannot allocate|failed to map|out of memory", re.IGNORECASE)


class Requests:
    """Keeps a child process running. A caller that holds `lock` makes several requests without others in between.

    `max_reply` bounds the bytes of arrays in a reply, `seconds` the time to the next message. `limit` is the model's
    memory limit in words, for errors; `starter` forks the processes. `child_learned` are the learned tensors that the
    child has now.
    """

    def __init__(
        self, request: Open, max_reply: int, seconds: float | None, limit: str, starter: Starter | None = None
    ) -> None:
        self.lock = threading.RLock()
        self.child_learned: Arrays = {}
        self.confinement: Confinement | None = None
        self.checkpoint: CheckpointFile | None = None
        self._open = request
        self._max_reply = max_reply
        self._seconds = seconds
        self._limit = limit
        self._closed = False
        self._starter = starter
        self._child: Child | None = Child(request, max_reply, starter)

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.process.pid

    def close(self) -> None:
        with self.lock:
            self._closed = True
            if self._child is not None:
                self._drop(self._child)

    def ask(
        self,
        what: str,
        body: Request,
        arrays: Arrays,
        expected: type[Reply],
        learned: Arrays,
        take: Callable[[str, Arrays], None],
        hooks: Hooks = NO_HOOKS,
    ) -> tuple[Reply, dict[str, np.ndarray]]:
        """Send `body` to a child that has the tensors `learned`, and return its reply.

        `take` gets what the child learned in a request that failed. Raises the child's own error, RuntimeLimitError if
        it exceeded a limit or died, RuntimeProgramError for an invalid reply, and what a callback or the control
        raises.
        """
        with self.lock:
            if self._closed:
                raise RuntimeInputError(f"{what}: this runtime is closed; load it again")
            if self._child is None:
                # A new process knows nothing of what its predecessor learned.
                self._child, self.child_learned = Child(self._open, self._max_reply, self._starter), {}
            child = self._child
            try:
                # The reply to Open is awaited here, and not in Child, so that a process that dies on loading is
                # explained.
                if not child.opened:
                    opened, _ = self._exchange(child, "load", None, {}, Opened, seconds=_START_SECONDS)
                    assert isinstance(opened, Opened)
                    self.confinement = opened.confinement
                    child.opened = True
                # The parent's tensors are the truth: set_parameters, or another child, may have changed them.
                if not _are_same(learned, self.child_learned):
                    self._exchange(child, what, Learn(), learned, Done, seconds=self._seconds)
                    self.child_learned = learned
                return self._exchange(child, what, body, arrays, expected, hooks, seconds=self._seconds)
            except _Refused as refused:
                if refused.learned:
                    take(what, refused.learned)
                raise refused.give() from None
            except (EOFError, ConnectionError):
                raise self._explain_death(child, what) from None
            except TimeoutError:
                self._drop(child)
                allowed = self._seconds or _START_SECONDS
                raise RuntimeLimitError(
                    f"{what}: no answer within the {allowed:g} seconds allowed; the process was ended. Allow "
                    "more seconds, give less data at once, or use a smaller model"
                ) from None
            except _CallerError as error:
                # The child has answered and goes on, so it is kept.
                raise error.give() from None
            except BaseException:
                # Interrupted in the middle of a message: nothing can follow on this connection.
                self._drop(child)
                raise

    def _exchange(
        self,
        child: Child,
        what: str,
        body: Request | None,
        arrays: Arrays,
        expected: type[Reply],
        hooks: Hooks = NO_HOOKS,
        *,
        seconds: float | None,
    ) -> tuple[Reply, dict[str, np.ndarray]]:
        channel = child.channel
        raised: BaseException | None = None
        if body is not None:
            channel.send(body, arrays, seconds)
        while True:
            reply, results = channel.receive(seconds)
            if isinstance(reply, Report | Between):
                # After an error of a callback the child is told to abort, and its last reply is read before the error
                # is raised: so the connection stays in step.
                proceed = Proceed(abort=True)
                if raised is None:
                    try:
                        proceed = Proceed(stop=self._follow(child, reply, hooks))
                    except BaseException as error:  # noqa: BLE001  (raised again below)
                        raised = error
                # A callback may have asked this runtime something that ended the child.
                if self._child is not child:
                    ended = RuntimeLimitError(f"{what}: its process was ended in a callback")
                    raise _CallerError(raised or ended)
                channel.send(proceed, {}, seconds)
                continue
            if isinstance(reply, KeepCheckpoint) and self.checkpoint is not None:
                channel.send(keep_checkpoint(self.checkpoint, reply, results), {}, seconds)
                continue
            if raised is not None:
                try:
                    raise _CallerError(raised)
                finally:
                    raised = None  # the error refers to this frame: see _Brought
            if isinstance(reply, Failed):
                raise _Refused(self._make_error(what, reply), results if reply.learned else {})
            if not isinstance(reply, expected):
                raise self.disbelieve(what, f"it answers {type(reply).__name__}")
            return reply, results

    def _follow(self, child: Child, reply: Report | Between, hooks: Hooks) -> bool:
        """Run the caller's callbacks, or its control. Returns whether training shall stop."""
        if isinstance(reply, Report):
            progress = Progress(reply.phase, reply.epoch, reply.step, reply.loss)
            # A list: every callback gets the step, also after one has asked to stop.
            return True in [callback(progress) for callback in hooks.callbacks]
        if hooks.control is None:
            return False

        def on_pause() -> None:
            try:
                self._exchange(child, "fit", WriteCheckpoint(), {}, Done, seconds=self._seconds)
            except _Refused as refused:
                raise refused.give() from None

        return not hooks.control.between_steps(on_pause)

    def _make_error(self, what: str, failed: Failed) -> ArchipelError:
        # The text comes from a process that ran graphs of others: no control characters in logs and terminals.
        text = "".join(c if c.isprintable() else " " for c in failed.text)
        if failed.kind == "RuntimeLimitError":
            return self._memory_error(what, text)
        # Only classes that take a message and nothing else; the name is the child's choice.
        kind = getattr(errors, failed.kind, None)
        if isinstance(kind, type) and issubclass(kind, ArchipelError) and kind.__init__ is Exception.__init__:
            return kind(text)
        return RuntimeProgramError(f"{what}: the isolated process failed: {text}")

    def _memory_error(self, what: str, how: str) -> RuntimeLimitError:
        return RuntimeLimitError(
            f"{what}: the model needs more memory than it may use ({self._limit}; {self._open.allowance} bytes of "
            f"private memory with what the runtime needs): {' '.join(how.split())[:LAST_WORDS]}. Raise memory_limit, "
            "use a smaller batch, or a smaller model"
        )

    def _explain_death(self, child: Child, what: str) -> BaseException:
        code, words = self._drop(child)
        quoted = f": {words}" if words else ""
        if code is None:
            return RuntimeLimitError(
                f"{what}: the process that runs the model died, and so did the one that would have seen how{quoted}. "
                "The system may be short of memory"
            )
        how = f"exit code {code}" if code >= 0 else f"signal {_signal_name(-code)}"
        # limit_cpu() in the child sends SIGPROF, whose default is to end the process.
        if -code == signal.SIGPROF and self._open.cpu_seconds is not None:
            return RuntimeLimitError(
                f"{what}: more than the {self._open.cpu_seconds:g} seconds of CPU time allowed; the process was ended. "
                "Allow more cpu_seconds, give less data at once, or use a smaller model"
            )
        # A failed allocation in C++ aborts (SIGABRT) with its reason on standard error; the kernel's OOM killer sends
        # SIGKILL.
        if code < 0 and (_OUT_OF_MEMORY.search(words) or -code == signal.SIGKILL):
            return self._memory_error(what, f"the process ended with {how}{quoted}")
        if code < 0:
            return RuntimeLimitError(
                f"{what}: the process that runs the model died ({how}){quoted}. It may use {self._limit}; the "
                "model needs more than that, or its graph crashes ONNX Runtime"
            )
        return RuntimeProgramError(f"{what}: the process that runs the model ended ({how}){quoted}")

    def disbelieve(self, what: str, why: str) -> RuntimeProgramError:
        """End the child, whose answer is invalid, and return the error to raise."""
        if self._child is not None:
            self._drop(self._child)
        return RuntimeProgramError(f"{what}: the isolated process gave an invalid answer and was ended: {why}")

    def _drop(self, child: Child) -> tuple[int | None, str]:
        if self._child is child:
            self._child, self.child_learned = None, {}
        return child.end(), child.last_words


class _Brought(Exception):
    """Brings an error to `ask`, which raises it instead."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error: BaseException | None = error

    def give(self) -> BaseException:
        """The error, once: from then on its context is this one, and two that refer to each other would keep the
        runtime, and so its process, until Python's garbage collector looks for cycles."""
        error, self._error = self._error, None
        assert error is not None
        return error


class _CallerError(_Brought):
    """A callback or the control has raised the error; the child has left its fit."""


class _Refused(_Brought):
    """The child answers with an error and goes on."""

    def __init__(self, error: ArchipelError, learned: Arrays) -> None:
        super().__init__(error)
        self.learned = learned


def _are_same(first: Arrays, second: Arrays) -> bool:
    # Arrays of a runtime are replaced and never changed, so comparing identities is enough.
    return first.keys() == second.keys() and all(array is second[name] for name, array in first.items())


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
