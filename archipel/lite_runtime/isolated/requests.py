"""Requests to the child process of an IsolatedRuntime, one at a time, with its end and its mistakes in view."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable

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

_START_SECONDS = 120.0
NO_HOOKS = Hooks()
_OUT_OF_MEMORY = re.compile(r"bad_alloc|MemoryError|cannot allocate|failed to map|out of memory", re.IGNORECASE)


class Requests:
    """Keeps a child running and knows what it has been told; `lock` makes several requests one.

    `max_reply` bounds the bytes of arrays in a reply, `seconds` the time to the next message. `limit` says in words
    what the model may use.
    """

    def __init__(self, request: Open, max_reply: int, seconds: float | None, limit: str) -> None:
        self.lock = threading.RLock()
        self.told: Arrays = {}
        self.confinement: Confinement | None = None
        self.checkpoint: CheckpointFile | None = None
        self._open = request
        self._max_reply = max_reply
        self._seconds = seconds
        self._limit = limit
        self._closed = False
        self._child: Child | None = Child(request, max_reply)

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
        """The reply to `body`, from a child that knows `learned`; `take` gets what it learned in a request that failed.

        Raises the child's own error, RuntimeLimitError when it was ended or died, RuntimeProgramError for an answer
        that is none, and what a callback or the control raises.
        """
        with self.lock:
            if self._closed:
                raise RuntimeInputError(f"{what}: this runtime is closed; load it again")
            if self._child is None:
                self._child, self.told = Child(self._open, self._max_reply), {}
            child = self._child
            try:
                if not child.opened:
                    opened, _ = self._exchange(child, "load", None, {}, Opened, seconds=_START_SECONDS)
                    assert isinstance(opened, Opened)
                    self.confinement = opened.confinement
                    child.opened = True
                if not _same(learned, self.told):
                    self._exchange(child, what, Learn(), learned, Done, seconds=self._seconds)
                    self.told = learned
                return self._exchange(child, what, body, arrays, expected, hooks, seconds=self._seconds)
            except _Refused as refused:
                if refused.learned:
                    take(what, refused.learned)
                raise refused.error from None
            except (EOFError, ConnectionError):
                raise self._died(child, what) from None
            except TimeoutError:
                self._drop(child)
                allowed = self._seconds or _START_SECONDS
                raise RuntimeLimitError(
                    f"{what}: no answer within the {allowed:g} seconds allowed; the process was ended. Allow "
                    "more seconds, give less data at once, or use a smaller model"
                ) from None
            except _CallerError as error:
                raise error.raised from None
            except BaseException:
                # Interrupted in the middle of a message: the connection is of no use any more.
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
            reply, found = channel.receive(seconds)
            if isinstance(reply, Report | Between):
                proceed = Proceed(abort=True)
                if raised is None:
                    try:
                        proceed = Proceed(stop=self._follow(child, reply, hooks))
                    except BaseException as error:  # noqa: BLE001  (raised again below)
                        raised = error
                if self._child is not child:
                    ended = RuntimeLimitError(f"{what}: its process was ended in a callback")
                    raise _CallerError(raised or ended)
                channel.send(proceed, {}, seconds)
                continue
            if isinstance(reply, KeepCheckpoint) and self.checkpoint is not None:
                channel.send(keep_checkpoint(self.checkpoint, reply, found), {}, seconds)
                continue
            if raised is not None:
                raise _CallerError(raised)
            if isinstance(reply, Failed):
                raise _Refused(self._error(what, reply), found if reply.learned else {})
            if not isinstance(reply, expected):
                raise self.disbelieve(what, f"it answers {type(reply).__name__}")
            return reply, found

    def _follow(self, child: Child, reply: Report | Between, hooks: Hooks) -> bool:
        """Whether training shall stop here."""
        if isinstance(reply, Report):
            progress = Progress(reply.phase, reply.epoch, reply.step, reply.loss)
            return True in [callback(progress) for callback in hooks.callbacks]
        if hooks.control is None:
            return False

        def on_pause() -> None:
            try:
                self._exchange(child, "fit", WriteCheckpoint(), {}, Done, seconds=self._seconds)
            except _Refused as refused:
                raise refused.error from None

        return not hooks.control.between_steps(on_pause)

    def _error(self, what: str, failed: Failed) -> ArchipelError:
        text = "".join(c if c.isprintable() else " " for c in failed.text)
        if failed.kind == "RuntimeLimitError":
            return self._exceeded(what, text)
        kind = getattr(errors, failed.kind, None)
        if isinstance(kind, type) and issubclass(kind, ArchipelError) and kind.__init__ is Exception.__init__:
            return kind(text)
        return RuntimeProgramError(f"{what}: the isolated process failed: {text}")

    def _exceeded(self, what: str, how: str) -> RuntimeLimitError:
        return RuntimeLimitError(
            f"{what}: the model needs more memory than it may use ({self._limit}; {self._open.allowance} bytes of "
            f"private memory with what the runtime needs): {' '.join(how.split())[:LAST_WORDS]}. Raise memory_limit, "
            "use a smaller batch, or a smaller model"
        )

    def _died(self, child: Child, what: str) -> BaseException:
        code, words = self._drop(child)
        how = f"exit code {code}" if code >= 0 else f"signal {_name(-code)}"
        said = f": {words}" if words else ""
        if -code == signal.SIGPROF and self._open.cpu_seconds is not None:
            return RuntimeLimitError(
                f"{what}: more than the {self._open.cpu_seconds:g} seconds of CPU time allowed; the process was ended. "
                "Allow more cpu_seconds, give less data at once, or use a smaller model"
            )
        if code < 0 and (_OUT_OF_MEMORY.search(words) or -code == signal.SIGKILL):
            return self._exceeded(what, f"the process ended with {how}{said}")
        if code < 0:
            return RuntimeLimitError(
                f"{what}: the process that runs the model died ({how}){said}. It may use {self._limit}; the "
                "model needs more than that, or its graph crashes ONNX Runtime"
            )
        return RuntimeProgramError(f"{what}: the process that runs the model ended ({how}){said}")

    def disbelieve(self, what: str, why: str) -> RuntimeProgramError:
        """End the child, whose answer cannot be right; the error to raise."""
        if self._child is not None:
            self._drop(self._child)
        return RuntimeProgramError(
            f"{what}: the isolated process gave an answer that cannot be right, and was ended: {why}"
        )

    def _drop(self, child: Child) -> tuple[int, str]:
        if self._child is child:
            self._child, self.told = None, {}
        return child.end(), child.last_words


class _Refused(Exception):
    """The child says no; it goes on."""

    def __init__(self, error: ArchipelError, learned: Arrays) -> None:
        super().__init__()
        self.error = error
        self.learned = learned


class _CallerError(Exception):
    """A callback or the control raised; the child has left its fit."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__()
        self.raised = raised


def _same(first: Arrays, second: Arrays) -> bool:
    # Arrays of a runtime are replaced and never changed, so identity says it all.
    return first.keys() == second.keys() and all(array is second[name] for name, array in first.items())


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
