"""A runtime whose graphs run in a child process, where the operating system enforces limits on memory and time.

A bundle's manifest only claims how much memory its programs need. The child gets the caller's arrays and returns
results. The parent keeps what was learned, so a new child that replaces one that was ended starts from the last
successful request. Linux only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec
import numpy as np

from archipel.bundle import WEIGHTS_FILE, Bundle, is_development_key, open_bundle
from archipel.errors import RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime.confinement import Confinement
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.fields import FIELD_ROLES, collect
from archipel.lite_runtime.isolated.answers import Answers
from archipel.lite_runtime.isolated.checkpoints import read_checkpoint
from archipel.lite_runtime.isolated.messages import (
    Analyze,
    Analyzed,
    Done,
    Evaluate,
    Fit,
    Fitted,
    LocalRound,
    Open,
    Predict,
    Reply,
    Request,
    Rounded,
)
from archipel.lite_runtime.isolated.packing import pack, pack_fit, pack_learned, pack_round
from archipel.lite_runtime.isolated.process import fixed_bytes
from archipel.lite_runtime.isolated.requests import NO_HOOKS, Requests
from archipel.lite_runtime.learned import BUNDLE_FOLDER, is_slot, read_learned
from archipel.lite_runtime.noise import Randomness
from archipel.lite_runtime.runtime import Runtime
from archipel.lite_runtime.training.calls import FitData, Hooks, Learning, RoundData
from archipel.lite_runtime.training.checkpoint import CheckpointFile
from archipel.lite_runtime.training.driver import need_program
from archipel.lite_runtime.training.fitting import checkpoint_file
from archipel.lite_runtime.training.options import FitOptions, RoundOptions
from archipel.lite_runtime.training.results import History, LocalUpdate

if TYPE_CHECKING:
    from archipel.lite_runtime.engines.delegates import Delegates
    from archipel.lite_runtime.isolated.starter import Starter

Arrays = Mapping[str, np.ndarray]

CLAIM_FACTOR = 4
"""Bytes of private memory allowed for each byte of the manifest's `peak_bytes`: arenas grow in powers of two, each
program has its own, and training holds two or three sets of the tensors that it moves (2.4 to 3.6 measured)."""

MAX_CPU_SECONDS = 10**9


def load_isolated(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    *,
    threads: int = 1,
    memory_limit: int | None = None,
    delegates: Delegates = "auto",
    cache: Path | str | None = None,
    state: DeviceState | None = None,
    allow_development: bool = False,
    seconds: float | None = None,
    cpu_seconds: float | None = None,
    niceness: int = 0,
    starter: Starter | None = None,
) -> IsolatedRuntime:
    """`load(..., isolated=True)`; arguments and errors are described there. Close the runtime, or let it be collected.

    `memory_limit` here bounds the private memory (bytes) that the model's programs take together in the child; None:
    a limit that follows from the manifest's claim. Raises RuntimeProgramError on systems other than Linux.
    """
    path = Path(path)
    slot = is_slot(path)
    source = path / BUNDLE_FOLDER if slot else path
    bundle = open_bundle(source, trusted_keys, cache, allow_development=allow_development)
    runtime = IsolatedRuntime(
        bundle,
        trusted_keys,
        threads=threads,
        memory_limit=memory_limit,
        delegates=delegates,
        state=state,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        niceness=niceness,
        starter=starter,
    )
    if slot:
        runtime.restore(read_learned(path))
    return runtime


class IsolatedRuntime(Learning):
    """A runtime with the methods and errors of Runtime (ModelRuntime lists them), whose graphs run in a child process.

    `load` describes the arguments and the errors. It answers requests of several threads one after the other. If the
    child dies, or exceeds its memory, `seconds` or `cpu_seconds`, the request raises RuntimeLimitError and has no
    effect, and the next request starts a new child.
    A `starter` (starter.py) makes that cheap where runtimes come and go.

    Example:
        with load("digits.bundle", trusted, isolated=True, seconds=10.0) as guarded:
            answers = guarded.predict(x[:1])
    """

    def __init__(
        self,
        bundle: Bundle,
        trusted_keys: Sequence[bytes],
        *,
        threads: int = 1,
        memory_limit: int | None = None,
        delegates: Delegates = "auto",
        state: DeviceState | None = None,
        seconds: float | None = None,
        cpu_seconds: float | None = None,
        niceness: int = 0,
        starter: Starter | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise RuntimeProgramError(
                f"isolated: child processes with a memory limit need Linux, this is {sys.platform}"
            )
        # `not >` also refuses NaN.
        if seconds is not None and not seconds > 0:
            raise RuntimeInputError(f"seconds must be above 0, got {seconds}")
        if cpu_seconds is not None and not 0 < cpu_seconds <= MAX_CPU_SECONDS:
            raise RuntimeInputError(f"cpu_seconds must be above 0 and at most {MAX_CPU_SECONDS}, got {cpu_seconds}")
        if niceness not in range(20):
            raise RuntimeInputError(f"niceness must be from 0 to 19, got {niceness}")
        # Keeps and checks what was learned; it never loads a graph.
        self._model = Runtime(bundle, threads=threads, memory_limit=memory_limit, delegates=delegates, state=state)
        self.bundle = bundle
        self.seconds = seconds
        claim = bundle.manifest.limits.peak_bytes
        model_bytes = CLAIM_FACTOR * claim if memory_limit is None else memory_limit
        self.allowance = model_bytes + fixed_bytes(bundle, threads, delegates)
        request = Open(
            folder=str(bundle.folder.resolve()),
            keys=tuple(trusted_keys),
            # Whoever opened the bundle for this process has decided about its publisher's key.
            allow_development=is_development_key(bundle.publisher),
            threads=threads,
            # The child's runtime subtracts the claim; the rest is its budget for keeping features.
            memory_limit=claim + max(0, (memory_limit or 0) - CLAIM_FACTOR * claim),
            allowance=self.allowance,
            delegates=delegates,
            cpu_seconds=cpu_seconds,
            niceness=int(niceness),
        )
        limit = f"{claim} bytes that its manifest claims" if memory_limit is None else f"{memory_limit} bytes"
        weights = bundle.folder / WEIGHTS_FILE
        size = weights.stat().st_size if WEIGHTS_FILE in bundle.manifest.files else 0
        # A reply holds new tensors, which lie in the child's private memory, and published ones, which are mapped.
        self._requests = Requests(request, self.allowance + 2 * size, seconds, limit, starter)
        self._answers = Answers(bundle, self._requests.disbelieve)

    # --- use ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> DeviceState:
        """As `Runtime.state`."""
        return self._model.state

    @property
    def confinement(self) -> Confinement | None:
        """Which rights the kernel took from the last child process; None before the first request."""
        return self._requests.confinement

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is none."""
        return self._requests.pid

    @overload
    def predict(self, x: np.ndarray) -> np.ndarray: ...
    @overload
    def predict(self, x: Arrays) -> dict[str, np.ndarray]: ...
    @overload
    def predict(self, x: Iterator[np.ndarray]) -> Iterator[np.ndarray]: ...
    @overload
    def predict(self, x: Iterator[Arrays]) -> Iterator[dict[str, np.ndarray]]: ...
    def predict(self, x: Any) -> Any:
        """As `Runtime.predict`."""
        if isinstance(x, Iterator):
            return map(self.predict, x)
        arrays = pack("predict", "x", x)
        program = self.bundle.program(need_program(self.bundle, "predict", "predict"))
        _, outputs = self._ask("predict", Predict(), arrays, Done)
        several = isinstance(x, Mapping)
        answers = self._answers.take_outputs(program, outputs, several)
        return answers if several else outputs["y"]

    def evaluate(
        self, x: np.ndarray | Arrays, y: np.ndarray | None = None, *, batch_size: int = 256
    ) -> dict[str, float]:
        """As `Runtime.evaluate`."""
        program = self.bundle.program(need_program(self.bundle, "evaluate", "evaluate"))
        arrays = {**pack("evaluate", "x", x), **pack("evaluate", "y", y)}
        reply, _ = self._ask("evaluate", Evaluate(batch_size=batch_size), arrays, Done)
        assert isinstance(reply, Done)
        self._answers.check_metrics("evaluate", program, reply.metrics)
        return reply.metrics

    def analyze(
        self,
        x: np.ndarray | Arrays,
        *,
        program: str = "",
        hyperparameters: Mapping[str, float] | None = None,
        batch_size: int = 256,
    ) -> tuple[dict[str, np.ndarray], int]:
        """As `Runtime.analyze`; the child gets only the fields that the program reads."""
        name = program or need_program(self.bundle, "analyze", "analyze")
        analysis = self.bundle.program(name)
        fields = collect("analyze", [port for port in analysis.inputs if isinstance(port, FIELD_ROLES)], x)
        values = {key: float(value) for key, value in (hyperparameters or {}).items()}
        body = Analyze(program=name, hyperparameters=values, batch_size=int(batch_size))
        reply, sums = self._ask("analyze", body, pack("analyze", "x", fields.arrays), Analyzed)
        assert isinstance(reply, Analyzed)
        # The parent's own count: the weight of an upload is not for the child to say.
        return self._answers.take_sums(analysis, fields.count, reply, sums), fields.count

    def parameters(self) -> dict[str, np.ndarray]:
        """As `Runtime.parameters`."""
        return self._model.parameters()

    def set_parameters(self, parameters: Arrays) -> None:
        """As `Runtime.set_parameters`."""
        # Under the lock of requests: one in another thread must not send half of the old tensors and half of the new.
        with self._requests.lock:
            self._model.set_parameters(parameters)

    def reset(self, what: Literal["personal", "state", "parameters"]) -> None:
        """As `Runtime.reset`."""
        with self._requests.lock:
            self._model.reset(what)

    def save(self, folder: Path | str) -> None:
        """As `Runtime.save`."""
        with self._requests.lock:
            self._model.save(folder)

    def restore(self, learned: Arrays) -> None:
        """As `Runtime.restore`."""
        with self._requests.lock:
            self._model.restore(learned)

    # --- learning -------------------------------------------------------------------------------------------------

    def run_fit(self, data: FitData, options: FitOptions, hooks: Hooks) -> History:
        """As `Runtime.run_fit`. Callbacks run in the parent and cost two messages for every step.

        They may predict and evaluate with this runtime, which answers with its tensors from before the fit. A fit that
        RuntimeLimitError cut short goes on from its checkpoint when it is called again.
        """
        name = options.program or need_program(self.bundle, "train", "learn")
        arrays = pack_fit(data)
        with self._requests.lock:
            # The file of an earlier fit must not take the checkpoints of this one.
            self._requests.checkpoint = None
            file = checkpoint_file(options)
            if file is not None:
                # Absolute, because the child names the file in its errors, and its working folder is another one.
                file = self._requests.checkpoint = CheckpointFile(file.path.absolute())
                options = msgspec.structs.replace(options, checkpoint=str(file.path))
                arrays.update(read_checkpoint(file))
            body = Fit(
                options=options,
                validation=data.validation is not None,
                report=bool(hooks.callbacks),
                # `seconds` is for one step: without messages between steps it would be for the whole fit.
                between=hooks.control is not None or (self.seconds is not None and not hooks.callbacks),
            )
            reply, results = self._ask("fit", body, arrays, Fitted, hooks)
            assert isinstance(reply, Fitted)
            metrics = self._answers.take_metrics(name, reply, results)
            self._take("fit", {n: a for n, a in results.items() if n != "loss" and not n.startswith("metric/")})
        return History(
            losses=results["loss"].tolist(),
            metrics={port: array.tolist() for port, array in metrics.items()},
            validation=reply.validation,
            steps=reply.steps,
            examples=reply.examples,
            stopped=reply.stopped,
        )

    def run_round(
        self, data: RoundData, options: RoundOptions, hooks: Hooks, randomness: Randomness | None = None
    ) -> LocalUpdate:
        """As `Runtime.run_round`, without `randomness`: the child draws noise from the operating system."""
        if randomness is not None:
            raise RuntimeInputError("local_round: an isolated runtime draws noise in its child; leave out randomness")
        finish = self.bundle.program(need_program(self.bundle, "finish", "take part in a round"))
        body = LocalRound(
            options=options,
            # `seconds` is for one step, as in a fit.
            report=bool(hooks.callbacks) or self.seconds is not None,
            given=data.parameters is not None,
        )
        with self._requests.lock:
            reply, results = self._ask("local_round", body, pack_round(data), Rounded, hooks)
            assert isinstance(reply, Rounded)
            update, trained = self._answers.take_round(finish, reply, results)
            # The trained parameters go to the caller; this runtime keeps its own, as Runtime does.
            self._take("local_round", {n: a for n, a in results.items() if n.startswith(("personal/", "state/"))})
        return LocalUpdate(
            arrays=update,
            examples=reply.examples,
            steps=reply.steps,
            metrics=reply.metrics,
            losses=results["loss"].tolist(),
            parameters=trained,
        )

    # --- the child ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the child. Parameters can still be read and saved; requests raise RuntimeInputError."""
        self._requests.close()

    def __enter__(self) -> IsolatedRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self,
        what: str,
        body: Request,
        arrays: Arrays,
        expected: type[Reply],
        hooks: Hooks = NO_HOOKS,
    ) -> tuple[Reply, dict[str, np.ndarray]]:
        return self._requests.ask(what, body, arrays, expected, self._learned(), self._take, hooks)

    def _learned(self) -> dict[str, np.ndarray]:
        return pack_learned(self.bundle, self._model.parameters(), self.state)

    def _take(self, what: str, learned: Arrays) -> None:
        """Check the tensors that the child has learned, and take them over."""
        self._answers.check_learned(what, learned, self.state)
        self._model.restore(learned)
        # The child has these already: without this line the next request would send them back.
        self._requests.child_learned = self._learned()
