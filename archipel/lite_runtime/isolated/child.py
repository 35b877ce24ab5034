"""The process that runs the graphs for an IsolatedRuntime; starting.py starts it.

It trusts its parent. Before it opens the bundle it gives up files, sockets and programs; it limits its own memory and
the CPU time of each request, and ends with its parent. It gets two file descriptors: its socket, and a pipe that closes
with the parent.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import resource
import select
import signal
import socket
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from archipel.errors import (
    ArchipelError,
    NonFiniteLossError,
    RuntimeInputError,
    RuntimeProgramError,
)
from archipel.lite_runtime.confinement import Confinement, asked_for, option_paths, restrict
from archipel.lite_runtime.confinement.limiting import limit_cpu, limit_memory
from archipel.lite_runtime.engines import sessions
from archipel.lite_runtime.isolated.checkpoints import ParentsFile
from archipel.lite_runtime.isolated.messages import (
    Analyze,
    Analyzed,
    Between,
    Channel,
    Done,
    Evaluate,
    Failed,
    Fit,
    Fitted,
    Learn,
    LocalRound,
    Open,
    Opened,
    Predict,
    Proceed,
    Reply,
    Report,
    Request,
    Rounded,
    WriteCheckpoint,
)
from archipel.lite_runtime.isolated.packing import group, pack_learned, unpack, unpack_fit, unpack_round
from archipel.lite_runtime.learned import join_names
from archipel.lite_runtime.runtime import Runtime, open_runtime
from archipel.lite_runtime.training.calls import Hooks
from archipel.lite_runtime.training.control import Control
from archipel.lite_runtime.training.results import Progress

MAX_OPEN_FILES = 256
_MAX_REQUEST_BYTES = 1 << 40  # the parent's caller holds these arrays in memory already
_SHARED_FROM_BYTES = 64 << 10

# ONNX Runtime's messages when memory runs out: in its arena, in C++ itself, for a mapping, for a thread's stack.
_NO_MEMORY = re.compile(
    r"bad_alloc|failed to allocate memory|cannot allocate memory|out of memory|pthread_create failed", re.IGNORECASE
)


class Aborted(Exception):
    """A callback in the parent has raised: the fit ends and has no effect."""


class Service:
    """Answers the parent's requests one after the other, and during training those of the parent's callbacks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._runtime: Runtime | None = None
        self._training = False
        self._cpu_seconds = 0.0

    def serve(self) -> None:
        """Answer requests until the parent closes the connection."""
        while True:
            try:
                request, arrays = self._channel.receive()
            except (EOFError, ConnectionError):
                return
            # Set anew for every request. A fit with the requests of its callbacks counts as one.
            limit_cpu(self._cpu_seconds)
            self._answer(request, arrays)  # type: ignore[arg-type]
            limit_cpu(0)

    def _answer(self, request: Request, arrays: Mapping[str, np.ndarray]) -> None:
        reply: Reply
        results: Mapping[str, np.ndarray] = {}
        try:
            reply, results = self._handle(request, arrays)
        except Aborted:
            reply = Failed(kind="Aborted", text="")
        except NonFiniteLossError as error:
            # The runtime holds the last weights with a finite loss; the parent shall have them, too.
            reply, results = _make_failed(type(error).__name__, error, learned=True), self._learned()
        except MemoryError:
            reply = _make_failed("RuntimeLimitError", "Python is out of memory")
        except ArchipelError as error:
            kind = "RuntimeLimitError" if _NO_MEMORY.search(str(error)) else type(error).__name__
            reply = _make_failed(kind, error)
        except Exception as error:  # noqa: BLE001  (the parent learns of all of them)
            text = "".join(traceback.format_exception(error)[-3:])
            reply = _make_failed("RuntimeLimitError" if _NO_MEMORY.search(str(error)) else "Exception", text)
        self._channel.send(reply, results)

    def _handle(self, request: Request, arrays: Mapping[str, np.ndarray]) -> tuple[Reply, Mapping[str, np.ndarray]]:
        if isinstance(request, Open):
            return Opened(confinement=self._open(request)), {}
        runtime = self._runtime
        if runtime is None:
            raise RuntimeInputError("isolated: nothing was opened")
        if self._training and not isinstance(request, Predict | Evaluate):
            raise RuntimeInputError("isolated: while it trains, callbacks can only predict and evaluate")
        match request:
            case Learn():
                # Reset first: `restore` leaves what it is not given, and the parent's tensors are all there are.
                runtime.reset("parameters")
                runtime.reset("personal")
                runtime.reset("state")
                runtime.restore(arrays)
                return Done(), {}
            case Predict():
                answer = runtime.predict(unpack("x", arrays))
                return Done(), join_names({"y": answer}) if isinstance(answer, dict) else {"y": answer}
            case Evaluate():
                x, y = unpack("x", arrays), arrays.get("y")
                return Done(metrics=runtime.evaluate(x, y, batch_size=request.batch_size)), {}
            case Analyze():
                sums, examples = runtime.analyze(
                    group("x", arrays),
                    program=request.program,
                    hyperparameters=request.hyperparameters,
                    batch_size=request.batch_size,
                )
                return Analyzed(examples=examples), join_names({"update": sums})
            case Fit() | LocalRound():
                self._training = True
                try:
                    return (
                        self._fit(runtime, request, arrays)
                        if isinstance(request, Fit)
                        else self._round(runtime, request, arrays)
                    )
                finally:
                    self._training = False
        raise RuntimeInputError(f"isolated: {type(request).__name__} is no request")

    def _open(self, request: Open) -> Confinement:
        if self._runtime is not None:
            raise RuntimeInputError("isolated: a bundle is open already")
        delegates = _restore_tuples(request.delegates)
        os.chdir(request.scratch)
        # Before the bundle is opened: its graphs are the first thing here that somebody else has written.
        try:
            confinement = restrict([request.folder, *option_paths(delegates)], [request.scratch], asked_for(delegates))
        except OSError as error:
            raise RuntimeProgramError(f"isolated: the process cannot be confined: {error}") from None
        tempfile.tempdir = request.scratch
        # Imports ONNX Runtime now, before the memory is limited, so that the limit is for the model alone.
        sessions.import_engines(delegates)
        _forget_warnings()
        limit_memory(request.allowance)
        # Threads inherit the niceness of the one that starts them, and none that runs graphs has started yet.
        os.nice(request.niceness)
        self._cpu_seconds = request.cpu_seconds or 0.0
        limit_cpu(self._cpu_seconds)
        self._runtime = open_runtime(
            request.folder,
            request.keys,
            threads=request.threads,
            memory_limit=request.memory_limit,
            delegates=delegates,
            allow_development=request.allow_development,
        )
        return confinement

    def _fit(
        self, runtime: Runtime, request: Fit, arrays: Mapping[str, np.ndarray]
    ) -> tuple[Reply, Mapping[str, np.ndarray]]:
        options = request.options
        history = runtime.run_fit(
            unpack_fit(arrays, request.validation),
            options,
            Hooks(
                callbacks=[self._report] if request.report else [],
                control=_ParentsControl(self._between) if request.between else None,
            ),
            None if options.checkpoint is None else ParentsFile(self._channel, options.checkpoint, arrays),
        )
        reply = Fitted(
            validation=history.validation, steps=history.steps, examples=history.examples, stopped=history.stopped
        )
        metrics = {name: np.asarray(values, np.float64) for name, values in history.metrics.items()}
        losses = np.asarray(history.losses, np.float64)
        return reply, {"loss": losses, **join_names({"metric": metrics}), **self._learned()}

    def _round(
        self, runtime: Runtime, request: LocalRound, arrays: Mapping[str, np.ndarray]
    ) -> tuple[Reply, Mapping[str, np.ndarray]]:
        update = runtime.run_round(
            unpack_round(arrays, request.given),
            request.options,
            Hooks(callbacks=[self._report] if request.report else []),
        )
        groups = {"update": update.arrays, "trained": update.parameters}
        device = {"personal": runtime.state.personal, "state": runtime.state.state}
        reply = Rounded(metrics=update.metrics, steps=update.steps, examples=update.examples)
        return reply, {"loss": np.asarray(update.losses, np.float64), **join_names({**groups, **device})}

    def _learned(self) -> dict[str, np.ndarray]:
        assert self._runtime is not None
        return pack_learned(self._runtime.bundle, self._runtime.parameters(), self._runtime.state)

    def _report(self, progress: Progress) -> bool:
        self._channel.send(Report(**progress._asdict()))
        return self._wait(lambda: None)

    def _between(self, on_pause: Callable[[], None]) -> bool:
        self._channel.send(Between())
        return not self._wait(on_pause)

    def _wait(self, on_pause: Callable[[], None]) -> bool:
        """Answer requests of the parent's callbacks until its Proceed. Returns whether to stop. Raises Aborted."""
        while True:
            request, arrays = self._channel.receive()
            if isinstance(request, Proceed):
                if request.abort:
                    raise Aborted
                return request.stop
            if isinstance(request, WriteCheckpoint):
                try:
                    on_pause()
                    self._channel.send(Done())
                except ArchipelError as error:
                    self._channel.send(_make_failed(type(error).__name__, error))
            else:
                self._answer(request, arrays)  # type: ignore[arg-type]


class _ParentsControl(Control):
    """Asks the caller's Control, which is in the parent."""

    def __init__(self, ask: Callable[[Callable[[], None]], bool]) -> None:
        super().__init__()
        self._ask = ask

    def between_steps(self, on_pause: Callable[[], None]) -> bool:
        return self._ask(on_pause)


def confine(lifeline: int) -> None:
    """Let this process end with its parent, write no core file with the caller's data, and open few files."""
    # When the parent's end of the pipe closes, the kernel sends SIGIO. Nobody handles that signal, so it ends this
    # process even deep inside a graph.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # The parent may have ended before O_ASYNC was set; then no signal comes.
    poll = select.poll()
    poll.register(lifeline, select.POLLHUP)
    if poll.poll(0):
        os.kill(os.getpid(), signal.SIGIO)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores it would hand that down
    files = min(MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def _allocate(nbytes: int) -> Any:
    # Shared memory does not count against RLIMIT_DATA, which is for the model and not for the caller's data.
    return bytearray(nbytes) if nbytes < _SHARED_FROM_BYTES else mmap.mmap(-1, nbytes)


def _forget_warnings() -> None:
    """Empty standard error of ONNX Runtime's warnings about closed files: they would pass for the last words."""
    if stat.S_ISREG(os.fstat(2).st_mode):
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _make_failed(kind: str, error: object, learned: bool = False) -> Failed:
    return Failed(kind=kind, text=str(error)[:8000], learned=learned)


def _restore_tuples(given: Any) -> Any:
    """Turn lists into pairs again: msgpack has no tuples."""
    if isinstance(given, Mapping):
        return {kind: _restore_tuples(choice) for kind, choice in given.items()}
    if isinstance(given, list):
        return [tuple(choice) if isinstance(choice, list) else choice for choice in given]
    return given


def run(connection: int, lifeline: int) -> None:
    """Answer the requests that come from the socket `connection`, until the parent closes it."""
    confine(lifeline)
    with socket.socket(fileno=connection) as own:
        Service(Channel(own, _MAX_REQUEST_BYTES, _allocate)).serve()


def main() -> None:
    """Run with the descriptors that the first two arguments name."""
    run(int(sys.argv[1]), int(sys.argv[2]))
    # Skips the interpreter's shutdown: nothing here needs it.
    os._exit(0)
