"""Runs a fit from its first step, or from its checkpoint, to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from archipel.bundle import Bundle, Phase
from archipel.bundle.roles import Metric
from archipel.errors import NonFiniteLossError, RuntimeInputError
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.fields import Fields
from archipel.lite_runtime.training.calls import Hooks
from archipel.lite_runtime.training.checkpoint import Checkpoint, CheckpointFile, fingerprint
from archipel.lite_runtime.training.driver import Training, Watch, run_begin, run_phases
from archipel.lite_runtime.training.options import FitOptions
from archipel.lite_runtime.training.results import Callback, History, Progress, loss_of
from archipel.lite_runtime.values import Values


class Fitting:
    """One call of `fit`, with callbacks, control and checkpoint. `validate` evaluates the values (None: never)."""

    def __init__(
        self,
        sessions: Sessions,
        bundle: Bundle,
        phase: Phase,
        values: Values,
        fields: Fields,
        options: FitOptions,
        hooks: Hooks,
        *,
        validate: Callable[[], dict[str, float]] | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._sessions = sessions
        self._bundle = bundle
        self._phase = phase
        self._values = values
        self._fields = fields
        self._options = options
        self._validate = validate
        self._control = hooks.control
        self._checkpoint = checkpoint
        self._written = time.monotonic()
        self._training = Training(fields.count)
        self._validation: list[dict[str, float]] = []
        self._on_step = call_all(hooks.callbacks)

    def run(self, feature_budget: int) -> History:
        """Train to the end, and keep features beyond `feature_budget` bytes on disk.

        Raises CheckpointError, or NonFiniteLossError, after which `values` has the last weights with a finite loss.
        """
        complete = self._restore()
        if not complete:
            # Later steps come from a checkpoint, which has what `begin` wrote.
            if self._values.steps == 0:
                run_begin(self._sessions, self._bundle, self._values)
            # Not an attribute: a reference cycle would keep the buffers of every fit until the next garbage collection.
            watch = Watch(self._on_step, None if self._validate is None else self._on_epoch, self._between)
            try:
                run_phases(
                    self._sessions,
                    self._bundle,
                    [self._phase],
                    self._values,
                    self._fields,
                    shuffle=self._options.shuffle,
                    watch=watch,
                    training=self._training,
                    keep_features=self._options.feature_cache,
                    feature_budget=feature_budget,
                )
            except NonFiniteLossError:
                # The caller gets the weights; a fit that continued from the file would only diverge again.
                if self._checkpoint is not None:
                    self._checkpoint.remove()
                raise
            # A complete file lets the same call return its result again, and another fit overwrite it.
            self._write(complete=True)
        training = self._training
        return History(
            losses=training.losses,
            metrics=training.metrics.values,
            validation=self._validation,
            steps=self._values.steps,
            examples=training.examples,
            stopped=training.stopped,
        )

    def _on_epoch(self) -> None:
        if self._validate is not None:
            self._validation.append(self._validate())

    def _between(self, store: Callable[[], None]) -> bool:
        # `store` first: the newest tensors are in the loop's buffers, not in the values.
        if self._checkpoint is not None and time.monotonic() - self._written >= self._options.checkpoint_every:
            store()
            self._write()
        if self._control is None:
            return True

        def on_pause() -> None:
            store()
            self._write()

        return self._control.between_steps(on_pause)

    def _write(self, complete: bool = False) -> None:
        if self._checkpoint is None:
            return
        training = self._training
        self._checkpoint.write(
            self._values,
            training.metrics.values,
            training.metrics.weights,
            training.used,
            phase=training.phase,
            batches=training.batches,
            validation=self._validation,
            complete=complete,
            stopped=training.stopped,
        )
        self._written = time.monotonic()

    def _restore(self) -> bool:
        """Continue from the checkpoint if there is one. Returns whether that fit is complete already."""
        restored = None if self._checkpoint is None else self._checkpoint.read(self._values, self._fields.count)
        if restored is None:
            return False
        training = self._training
        ports = [port for port in self._bundle.program(self._phase.program).outputs if isinstance(port, Metric)]
        training.metrics.values.update(restored.metrics)
        training.metrics.weights.update(restored.weights)
        # Not in the file, since the manifest, which the fingerprint covers, has them.
        training.metrics.reductions.update({port.name: port.reduction for port in ports})
        training.used[...] = restored.used
        training.phase, training.batches = restored.header.phase, restored.header.batches
        loss = loss_of(ports)
        if loss is not None:
            training.losses.extend(restored.metrics.get(loss.name, []))
        training.stopped = restored.header.stopped
        self._validation = restored.validation
        return restored.header.complete


def open_checkpoint(
    file: CheckpointFile | None,
    bundle: Bundle,
    phase: Phase,
    fields: Fields,
    state: DeviceState,
    values: Values,
    options: FitOptions,
) -> Checkpoint | None:
    """The checkpoint in `file`, bound by its fingerprint to a fit with these inputs; None without a file."""
    if file is None:
        return None
    # Also the tensors that the fit starts from: from others the same data and options give another result.
    groups = {
        "data": fields.arrays,
        "parameter": values.start,
        "personal": state.personal,
        "state": state.state,
        "broadcast": values.broadcast,
    }
    return Checkpoint(file, fingerprint(bundle, [phase], options.deciding(), groups))


def checkpoint_file(options: FitOptions) -> CheckpointFile | None:
    """The checkpoint file in the options, or None. Raises RuntimeInputError if it cannot be written there."""
    return None if options.checkpoint is None else CheckpointFile(check_path(options.checkpoint))


def check_path(path: Path | str) -> Path:
    """Raises RuntimeInputError if no checkpoint can be written to `path`."""
    path = Path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise RuntimeInputError(f"checkpoint {path}: expected a file in a folder that exists")
    return path


def call_all(callbacks: Sequence[Callback]) -> Callback | None:
    """One callback that calls all of them, even after one has asked to stop."""
    if not callbacks:
        return None

    def call(progress: Progress) -> bool:
        return True in [callback(progress) for callback in callbacks]

    return call
