"""A runtime whose graphs run in a child process, so that what they may cost is enforced and not only announced.

A bundle's manifest says how much memory its programs need, and a signature says who vouches for that. Here the
operating system holds them to it. The child gets the caller's arrays and gives back results; what was learned is kept
in the parent, so that a child that had to be ended is replaced by a new one that knows as much as the last one did
after its last successful request. Linux only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from archipel.bundle import WEIGHTS_FILE, Bundle, Program, open_bundle
from archipel.bundle.manifest import TensorSpec
from archipel.bundle.roles import Metric, Parameter, Personal, Port, State, Update, role_of
from archipel.errors import CheckpointError, RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime.confinement import Confinement
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.fields import FIELD_ROLES, check_array, collect
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
    group,
    pack,
)
from archipel.lite_runtime.isolated.process import fixed_bytes
from archipel.lite_runtime.isolated.requests import Requests
from archipel.lite_runtime.learned import BUNDLE_FOLDER, is_slot, join_names, read_learned
from archipel.lite_runtime.noise import Randomness
from archipel.lite_runtime.runtime import Runtime
from archipel.lite_runtime.training.checkpoint import MAX_CHECKPOINT_BYTES, CheckpointFile
from archipel.lite_runtime.training.control import Control
from archipel.lite_runtime.training.driver import find_program, need_program
from archipel.lite_runtime.training.fitting import checked_path
from archipel.lite_runtime.training.results import Callback, History, LocalUpdate

if TYPE_CHECKING:
    from archipel.lite_runtime.delegates import Delegates

Arrays = Mapping[str, np.ndarray]

CLAIM_FACTOR = 4
"""How much private memory may become of a byte of the manifest's `peak_bytes`: arenas grow in powers of two, each
program has its own, and training holds two or three sets of what it moves (2.4 to 3.6 measured)."""

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
    seconds: float | None = None,
    cpu_seconds: float | None = None,
    niceness: int = 0,
) -> IsolatedRuntime:
    """As `load`, with a child process that runs the graphs; close it, or let it be collected.

    `memory_limit` bounds the private memory (bytes) that the model's programs take together in that process; without
    one it follows from what the manifest claims. `seconds` bounds one prediction, evaluation, analysis or training
    step; `cpu_seconds` the CPU time of one request in all threads, also of a whole fit or round. `niceness` (0 to 19)
    lets other processes go first. Raises what `load` raises, and RuntimeProgramError where there are no such processes.
    """
    path = Path(path)
    slot = is_slot(path)
    bundle = open_bundle(path / BUNDLE_FOLDER if slot else path, trusted_keys, cache)
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
    )
    if slot:
        runtime.restore(read_learned(path))
    return runtime


class IsolatedRuntime:
    """Methods and errors are those of Runtime; requests of several threads are answered one after the other.

    Where the child exceeds its memory, `seconds` or `cpu_seconds`, or dies, the request raises RuntimeLimitError, has
    no effect, and the next one starts a new child.
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
    ) -> None:
        if sys.platform != "linux":
            raise RuntimeProgramError(
                f"isolated: child processes with a memory limit need Linux, this is {sys.platform}"
            )
        if seconds is not None and not seconds > 0:
            raise RuntimeInputError(f"seconds must be above 0, got {seconds}")
        if cpu_seconds is not None and not 0 < cpu_seconds <= MAX_CPU_SECONDS:
            raise RuntimeInputError(f"cpu_seconds must be above 0 and at most {MAX_CPU_SECONDS}, got {cpu_seconds}")
        if niceness not in range(20):
            raise RuntimeInputError(f"niceness must be from 0 to 19, got {niceness}")
        # Holds and checks what was learned; no graph is ever loaded by it.
        self._model = Runtime(bundle, threads=threads, memory_limit=memory_limit, delegates=delegates, state=state)
        self.bundle = bundle
        self.seconds = seconds
        claim = bundle.manifest.limits.peak_bytes
        self.allowance = (CLAIM_FACTOR * claim if memory_limit is None else memory_limit) + fixed_bytes(bundle, threads)
        request = Open(
            folder=str(bundle.folder.resolve()),
            keys=tuple(trusted_keys),
            threads=threads,
            # What the runtime in there may spend on keeping features, on top of the claim.
            memory_limit=claim + max(0, (memory_limit or 0) - CLAIM_FACTOR * claim),
            allowance=self.allowance,
            delegates=delegates,
            cpu_seconds=cpu_seconds,
            niceness=int(niceness),
        )
        limit = f"{claim} bytes that its manifest claims" if memory_limit is None else f"{memory_limit} bytes"
        weights = bundle.folder / WEIGHTS_FILE
        size = weights.stat().st_size if WEIGHTS_FILE in bundle.manifest.files else 0
        # All that a reply can hold: new tensors, which are in the child's own memory, and published ones.
        self._requests = Requests(request, self.allowance + 2 * size, seconds, limit)

    # --- use ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> DeviceState:
        return self._model.state

    @property
    def confinement(self) -> Confinement | None:
        """What held the last child process: which of its powers the kernel took away. None before there was one."""
        return self._requests.confinement

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is none."""
        return self._requests.pid

    def predict(self, x: Any) -> Any:
        """As `Runtime.predict`."""
        if isinstance(x, Iterator):
            return map(self.predict, x)
        arrays = pack("predict", "x", x)
        program = self.bundle.program(need_program(self.bundle, "predict", "predict"))
        _, found = self._ask("predict", Predict(), arrays, Done)
        ports = {port.name: port for port in program.outputs}
        several = isinstance(x, Mapping)
        answers = group("y", found) if several else {name: found["y"] for name in ports if "y" in found}
        if set(answers) != set(ports) or len(found) != len(ports):
            raise self._requests.disbelieve("predict", f"outputs {sorted(found)} are not those of the program")
        for name, array in answers.items():
            try:
                check_array("predict", ports[name], array)
            except RuntimeInputError as error:
                raise RuntimeProgramError(f"{error}: the graph answers what the manifest does not say") from None
            array.flags.writeable = bool(array.nbytes)  # it is the caller's now
        return answers if several else found["y"]

    def evaluate(
        self, x: np.ndarray | Arrays, y: np.ndarray | None = None, *, batch_size: int = 256
    ) -> dict[str, float]:
        """As `Runtime.evaluate`."""
        program = self.bundle.program(need_program(self.bundle, "evaluate", "evaluate"))
        arrays = {**pack("evaluate", "x", x), **pack("evaluate", "y", y)}
        reply, _ = self._ask("evaluate", Evaluate(batch_size=batch_size), arrays, Done)
        assert isinstance(reply, Done)
        self._check_names("evaluate", reply.metrics, _metrics(program))
        return reply.metrics

    def analyze(
        self,
        x: np.ndarray | Arrays,
        *,
        program: str = "",
        hyperparameters: Mapping[str, float] | None = None,
        batch_size: int = 256,
    ) -> tuple[dict[str, np.ndarray], int]:
        """As `Runtime.analyze`; the process gets the fields that the program reads."""
        name = program or need_program(self.bundle, "analyze", "analyze")
        look = self.bundle.program(name)
        fields = collect("analyze", [port for port in look.inputs if isinstance(port, FIELD_ROLES)], x)
        body = Analyze(program=name, hyperparameters=_floats(hyperparameters), batch_size=int(batch_size))
        reply, found = self._ask("analyze", body, pack("analyze", "x", fields.arrays), Analyzed)
        assert isinstance(reply, Analyzed)
        kinds = {f"update/{port.name}": _kind(port) for port in look.outputs if isinstance(port, Update)}
        self._check_kinds("analyze", found, kinds)
        if set(found) != set(kinds) or reply.examples != fields.count:
            raise self._requests.disbelieve("analyze", f"it made {sorted(found)} of {reply.examples} examples")
        return group("update", found), fields.count

    def parameters(self) -> dict[str, np.ndarray]:
        return self._model.parameters()

    def set_parameters(self, parameters: Arrays) -> None:
        """As `Runtime.set_parameters`."""
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

    def fit(
        self,
        x: np.ndarray | Arrays,
        y: np.ndarray | None = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        hyperparameters: Mapping[str, float] | None = None,
        validation: tuple[np.ndarray | Arrays, np.ndarray | None] | None = None,
        callbacks: Sequence[Callback] = (),
        program: str | None = None,
        moves: Sequence[str] | None = None,
        broadcast: Arrays | None = None,
        checkpoint: Path | str | None = None,
        checkpoint_every: float = 30.0,
        control: Control | None = None,
        feature_cache: bool = True,
    ) -> History:
        """As `Runtime.fit`. Callbacks run here, in the parent, and cost a message there and back for every step.

        They may predict and evaluate with this runtime, and see it as it was before the fit. A fit that is cut short by
        RuntimeLimitError goes on from its checkpoint when it is called again.
        """
        name = program or need_program(self.bundle, "train", "learn")
        arrays = {
            **pack("fit", "x", x),
            **pack("fit", "y", y),
            **pack("fit", "broadcast", dict(broadcast or {})),
            **pack("fit: validation", "vx", None if validation is None else validation[0]),
            **pack("fit: validation", "vy", None if validation is None else validation[1]),
        }
        body = Fit(
            epochs=int(epochs),
            batch_size=int(batch_size),
            shuffle=bool(shuffle),
            seed=int(seed),
            hyperparameters=_floats(hyperparameters),
            validation=validation is not None,
            report=bool(callbacks),
            # With a time limit, steps are what shows that the child is alive.
            between=control is not None or (self.seconds is not None and not callbacks),
            program=program,
            moves=None if moves is None else tuple(moves),
            checkpoint=None if checkpoint is None else str(Path(checkpoint).absolute()),
            checkpoint_every=float(checkpoint_every),
            feature_cache=bool(feature_cache),
        )
        with self._requests.lock:
            self._requests.checkpoint = None
            if checkpoint is not None:
                self._requests.checkpoint = CheckpointFile(checked_path(checkpoint).absolute())
                arrays.update(read_checkpoint(self._requests.checkpoint))
            reply, found = self._ask("fit", body, arrays, Fitted, callbacks, control)
            assert isinstance(reply, Fitted)
            metrics = group("metric", found)
            ports = _metrics(self.bundle.program(name))
            self._check_names("fit", metrics, ports)
            self._check_columns("fit", {**metrics, "loss": found.get("loss")}, reply.steps)
            for epoch in reply.validation:
                validated = find_program(self.bundle, "evaluate")
                self._check_names("fit", epoch, _metrics(self.bundle.program(validated or name)))
            self._take("fit", {n: a for n, a in found.items() if n != "loss" and not n.startswith("metric/")})
        return History(
            losses=found["loss"].tolist(),
            metrics={port: array.tolist() for port, array in metrics.items()},
            validation=reply.validation,
            steps=reply.steps,
            examples=reply.examples,
            stopped=reply.stopped,
        )

    def local_round(
        self,
        x: np.ndarray | Arrays,
        y: np.ndarray | None = None,
        *,
        seed: int,
        parameters: Arrays | None = None,
        broadcast: Arrays | None = None,
        hyperparameters: Mapping[str, float] | None = None,
        callbacks: Sequence[Callback] = (),
        randomness: Randomness | None = None,
    ) -> LocalUpdate:
        """As `Runtime.local_round`; noise is drawn in the child, from the operating system, so no `randomness`."""
        if randomness is not None:
            raise RuntimeInputError("local_round: an isolated runtime draws noise in its child; leave out randomness")
        finish = self.bundle.program(need_program(self.bundle, "finish", "take part in a round"))
        arrays = {
            **pack("local_round", "x", x),
            **pack("local_round", "y", y),
            **pack("local_round", "broadcast", dict(broadcast or {})),
            **pack("local_round", "parameter", None if parameters is None else dict(parameters)),
        }
        body = LocalRound(
            seed=int(seed),
            hyperparameters=_floats(hyperparameters),
            # With a time limit, steps are what shows that the child is alive.
            report=bool(callbacks) or self.seconds is not None,
            given=parameters is not None,
        )
        with self._requests.lock:
            reply, found = self._ask("local_round", body, arrays, Rounded, callbacks)
            assert isinstance(reply, Rounded)
            update, trained = group("update", found), group("trained", found)
            ports = {port.name: port for port in finish.outputs if isinstance(port, Update)}
            specs = {spec.name: spec for spec in self.bundle.manifest.parameters}
            if set(update) != set(ports) or set(trained) != set(specs):
                raise self._requests.disbelieve("local_round", f"it made {sorted(found)}")
            kinds = {f"update/{name}": _kind(port) for name, port in ports.items()}
            kinds.update({f"trained/{name}": _kind(spec) for name, spec in specs.items()})
            self._check_kinds("local_round", found, kinds)
            self._check_columns("local_round", {"loss": found.get("loss")}, reply.steps)
            self._take("local_round", {n: a for n, a in found.items() if n.startswith(("personal/", "state/"))})
        return LocalUpdate(
            arrays=update,
            examples=reply.examples,
            steps=reply.steps,
            metrics=reply.metrics,
            losses=found["loss"].tolist(),
            parameters=trained,
        )

    # --- the child ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the child. What was learned can still be read and saved; anything else raises RuntimeInputError."""
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
        callbacks: Sequence[Callback] = (),
        control: Control | None = None,
    ) -> tuple[Reply, dict[str, np.ndarray]]:
        return self._requests.ask(what, body, arrays, expected, self._learned(), self._take, callbacks, control)

    def _learned(self) -> dict[str, np.ndarray]:
        published = self.bundle.parameters()
        moved = {n: array for n, array in self._model.parameters().items() if array is not published[n]}
        return join_names({"parameter": moved, "personal": self.state.personal, "state": self.state.state})

    def _take(self, what: str, learned: Arrays) -> None:
        """Make what the child has learned this runtime's own, after checking that it is of this bundle."""
        ports = {
            (role_of(port), port.tensor): port
            for program in self.bundle.manifest.programs.values()
            for port in (*program.inputs, *program.outputs)
            if isinstance(port, Parameter | Personal | State)
        }
        for name, array in learned.items():
            role, _, tensor = name.partition("/")
            port = ports.get((role, tensor))
            before = getattr(self.state, role, {}).get(tensor) if port is None else None
            fits = before is not None if port is None else (array.dtype.name, array.shape) == (port.dtype, port.shape)
            if not fits:
                raise self._requests.disbelieve(what, f"it has learned {name!r}: {array.dtype}{list(array.shape)}")
        self._model.restore(learned)
        self._requests.told = self._learned()

    def _check_names(self, what: str, found: Mapping[str, object], expected: set[str]) -> None:
        if not set(found) <= expected:
            raise self._requests.disbelieve(what, f"metrics {sorted(found)}, expected {sorted(expected)}")

    def _check_kinds(self, what: str, found: Arrays, kinds: Mapping[str, tuple[str, tuple[int | str, ...]]]) -> None:
        for name, kind in kinds.items():
            if name in found and (found[name].dtype.name, found[name].shape) != kind:
                raise self._requests.disbelieve(what, f"{name!r} is {found[name].dtype}{list(found[name].shape)}")

    def _check_columns(self, what: str, columns: Mapping[str, np.ndarray | None], steps: int) -> None:
        for name, array in columns.items():
            if array is None or array.dtype != np.float64 or array.shape not in ((steps,), (0,)):
                raise self._requests.disbelieve(what, f"{name!r} does not have {steps} steps")


def read_checkpoint(file: CheckpointFile) -> dict[str, np.ndarray]:
    """The bytes of the file, to be sent along. Raises CheckpointError."""
    try:
        if file.read() is None:
            return {}
        if file.path.stat().st_size > MAX_CHECKPOINT_BYTES:
            raise CheckpointError(f"{file.path}: larger than {MAX_CHECKPOINT_BYTES} bytes; not a checkpoint")
        return {"checkpoint": np.fromfile(file.path, np.uint8)}
    except OSError as error:
        raise CheckpointError(f"{file.path}: the checkpoint cannot be read ({error.strerror})") from None


def _floats(values: Mapping[str, float] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (values or {}).items()}


def _kind(of: Port | TensorSpec) -> tuple[str, tuple[int | str, ...]]:
    return of.dtype, of.shape


def _metrics(program: Program) -> set[str]:
    return {port.name for port in program.outputs if isinstance(port, Metric)}
