"""A bundle that predicts, evaluates and keeps learning on this device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from archipel.bundle import Bundle, Phase, open_bundle
from archipel.bundle.roles import Example, Noise
from archipel.errors import (
    IndexRangeError,
    NonFiniteLossError,
    RuntimeInputError,
    RuntimeLimitError,
    RuntimeProgramError,
)
from archipel.lite_runtime.analysis import analyze
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.evaluation import evaluate, evaluation_fields
from archipel.lite_runtime.fields import collect
from archipel.lite_runtime.learned import BUNDLE_FOLDER, is_slot, read_learned, read_parameters, write_slot
from archipel.lite_runtime.noise import Randomness
from archipel.lite_runtime.out_of_range import locate, locating
from archipel.lite_runtime.predictor import Predictor
from archipel.lite_runtime.present_model import PresentModel
from archipel.lite_runtime.training.calls import FitData, Hooks, Learning, RoundData
from archipel.lite_runtime.training.checkpoint import CheckpointFile
from archipel.lite_runtime.training.driver import (
    Watch,
    collect_data,
    need_program,
    run_round,
)
from archipel.lite_runtime.training.features import DEFAULT_BUDGET
from archipel.lite_runtime.training.fitting import Fitting, call_all, checkpoint_file, open_checkpoint
from archipel.lite_runtime.training.options import FitOptions, RoundOptions
from archipel.lite_runtime.training.results import History, LocalUpdate
from archipel.lite_runtime.values import Values, check_noise

if TYPE_CHECKING:
    from archipel.lite_runtime.engines.delegates import DelegateReport, Delegates
    from archipel.lite_runtime.profile import Profile

Arrays = Mapping[str, np.ndarray]


def open_runtime(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    *,
    threads: int = 1,
    memory_limit: int | None = None,
    delegates: Delegates = "auto",
    cache: Path | str | None = None,
    state: DeviceState | None = None,
    allow_development: bool = False,
    weights: Path | str | Arrays | None = None,
) -> Runtime:
    """`archipel.lite_runtime.load` in this process; its arguments and errors are described there.

    `weights`: all of the bundle's parameters, which replace its own: by name, or a safetensors file of them, as
    `archipel task download` writes it. Raises also RuntimeInputError, which names the file, for weights that do not
    fit.
    """
    path = Path(path)
    slot = is_slot(path)
    source = path / BUNDLE_FOLDER if slot else path
    bundle = open_bundle(source, trusted_keys, cache, allow_development=allow_development)
    runtime = Runtime(bundle, threads=threads, memory_limit=memory_limit, delegates=delegates, state=state)
    if slot:
        runtime.restore(read_learned(path))
    if weights is not None:
        runtime.set_parameters(read_parameters(weights, bundle))
    return runtime


class Runtime(Learning):
    """Holds a model's present parameters and the device's own state; ONNX Runtime runs the programs.

    `load` makes one, and describes the arguments; RuntimeLimitError: `memory_limit` bytes are too few for the bundle.
    Learning describes `fit` and `local_round`. Each program's session is made when it is first
    needed. A caller that saves `state` (`DeviceState.save`) keeps personal tensors and control variates over restarts.

    Example:
        runtime = load("digits.bundle", trusted)
        runtime.fit(x, y, epochs=2)
        print(runtime.evaluate(x, y)["loss"], runtime.parameters()["head.weight"].shape)
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int = 1,
        memory_limit: int | None = None,
        delegates: Delegates = "auto",
        state: DeviceState | None = None,
    ) -> None:
        need = bundle.manifest.limits.peak_bytes
        if memory_limit is not None and need > memory_limit:
            raise RuntimeLimitError(
                f"bundle {bundle.manifest.name!r} needs up to {need} bytes of memory, the limit here is "
                f"{memory_limit}; raise memory_limit or use a smaller model"
            )
        # Now, and not in the middle of a round that the server counts on.
        for program in bundle.manifest.programs.values():
            for port in program.inputs:
                if isinstance(port, Noise):
                    check_noise(port)
        self.bundle = bundle
        self.state = state if state is not None else DeviceState()
        self._model = PresentModel(bundle, self.state)
        self._sessions = Sessions(bundle, threads, delegates)
        # The manifest's claim does not include kept features: they get the rest of the limit.
        self._feature_budget = DEFAULT_BUDGET if memory_limit is None else memory_limit - need

    # --- use ------------------------------------------------------------------------------------------------------

    @overload
    def predict(self, x: np.ndarray) -> np.ndarray: ...
    @overload
    def predict(self, x: Arrays) -> dict[str, np.ndarray]: ...
    @overload
    def predict(self, x: Iterator[np.ndarray]) -> Iterator[np.ndarray]: ...
    @overload
    def predict(self, x: Iterator[Arrays]) -> Iterator[dict[str, np.ndarray]]: ...
    def predict(self, x: Any) -> Any:
        """Run the model with its present parameters.

        Arguments:
            x: a batch, `[batch, ...]` with the dtype and shape of the program's example field, where it has one field
                and one output; or a mapping from field name to such arrays; or an iterator of either.

        Returns the output's array, `[batch, ...]`, for an array; a dict of arrays by output name for a mapping; for an
        iterator an iterator, which runs the model when its next element is requested.

        Raises RuntimeInputError for arrays that do not fit the program's fields, RuntimeProgramError for a bundle
        without a `predict` program, or whose graph fails.

        Example:
            classes = runtime.predict(x).argmax(axis=1)
        """
        predictor = self._model.predictor
        if predictor is None:
            predictor = self._model.make_predictor(self._sessions)
        try:
            if isinstance(x, np.ndarray):
                return predictor.one(x)
            if isinstance(x, Mapping):
                return predictor.many(x)
        except IndexRangeError as error:
            fields = x if isinstance(x, Mapping) else dict.fromkeys(predictor.fields, x)
            raise locate(error, self.bundle, fields) from None
        # A list is usually meant as one array, not as several batches: `one` raises the error that says so.
        return map(self.predict, x) if isinstance(x, Iterator) else predictor.one(x)

    def evaluate(
        self, x: np.ndarray | Arrays, y: np.ndarray | None = None, *, batch_size: int = 256
    ) -> dict[str, float]:
        """Measure what `predict` answers, with the present parameters, on labelled examples.

        Arguments:
            x: `[examples, ...]` with the dtype and shape of the example field of `predict`; where it has several
                fields, a mapping from field name to such arrays, which may hold the labels too.
            y: `[examples, ...]`, the label field of `evaluate`.
            batch_size: examples at a time, at least 1; the result is that of all examples.

        Returns the bundle's metrics by name, each reduced over the batches as its role declares.

        Raises RuntimeInputError for arrays that do not fit these fields, RuntimeProgramError for a bundle without an
        `evaluate` program, or whose graph fails.

        Example:
            loss = runtime.evaluate(x, y)["loss"]
        """
        return self._evaluate(self._model.make_predictor(self._sessions), self._values(), x, y, batch_size)

    def analyze(
        self,
        x: np.ndarray | Arrays,
        *,
        program: str = "",
        hyperparameters: Mapping[str, float] | None = None,
        batch_size: int = 256,
    ) -> tuple[dict[str, np.ndarray], int]:
        """Run an `analyze` program over all examples.

        Arguments:
            x: a mapping from field name to `[examples, ...]`, or the array of the only example field.
            program: the program's name; "": the bundle's only `analyze` program.
            hyperparameters: values by name, within the bounds that the bundle declares.
            batch_size: examples at a time, at least 1; a program that draws noise gets all at once.

        Returns the sums to upload by output name, and the number of examples.

        Raises RuntimeInputError, RuntimeProgramError.
        """
        name = program or need_program(self.bundle, "analyze", "analyze")
        values = self._values(hyperparameters=hyperparameters)
        chosen = self.bundle.program(name)
        fields = [port.name for port in chosen.inputs if isinstance(port, Example)]
        with locating(self.bundle, x if isinstance(x, Mapping) else dict.fromkeys(fields, x)):
            return analyze(self._sessions.get(name), chosen, values, x, batch_size)

    def parameters(self) -> dict[str, np.ndarray]:
        """The present global parameters by name, read-only."""
        return dict(self._model.parameters)

    def set_parameters(self, parameters: Arrays) -> None:
        """Replace some or all parameters. Raises RuntimeInputError for an unknown name, a wrong dtype or shape."""
        self._model.adopt(self._model.check_parameters(parameters))

    def derived(self) -> dict[str, np.ndarray]:
        """The initializers of `predict` as `refresh` computes them from the present parameters, by name."""
        return self._model.derived(self._sessions, self._values())

    def reset(self, what: Literal["personal", "state", "parameters"]) -> None:
        """Remove the personal tensors or the device's state, or go back to the bundle's own parameters."""
        self._model.reset(what)

    def save(self, folder: Path | str) -> None:
        """Write the bundle and what was learned on top of it to a folder that `load` opens; it is on disk on return.

        A saved model of the same bundle in `folder` is replaced atomically. Raises RuntimeInputError if `folder` holds
        anything else.
        """
        write_slot(Path(folder), self.bundle, self._model.learned())

    def restore(self, learned: Arrays) -> None:
        """Restore the tensors that `save` wrote: `parameter/NAME`, `personal/NAME`, `state/NAME`.

        Raises TensorLayoutError for other names, RuntimeInputError for parameters that are not this bundle's.
        """
        self._model.restore(learned)

    def profile(self, x: np.ndarray | Arrays, *, runs: int = 20) -> Profile:
        """Measure the time of each kernel of `predict` in `runs` runs on `x`. Raises RuntimeInputError."""
        from archipel.lite_runtime.profile import profile_predict

        name = need_program(self.bundle, "predict", "predict")
        return profile_predict(self._sessions, name, self._model.new_predictor, x, runs)

    def delegate_report(self) -> DelegateReport:
        """Which delegate runs which node of the programs used so far, and why other delegates were left out."""
        return self._sessions.report()

    # --- learning -------------------------------------------------------------------------------------------------

    def run_fit(
        self, data: FitData, options: FitOptions, hooks: Hooks, checkpoint: CheckpointFile | None = None
    ) -> History:
        """As `fit`, with its options in one struct. `checkpoint` replaces the options' file in a child process."""
        phase = self._phase(options)
        fields = collect_data(self.bundle, [phase], data.x, data.y)
        values = self._values(
            broadcast=data.broadcast,
            hyperparameters=options.hyperparameters,
            seed=options.seed,
            examples=fields.count,
        )
        file = checkpoint or checkpoint_file(options)
        fitting = Fitting(
            self._sessions,
            self.bundle,
            phase,
            values,
            fields,
            options,
            hooks,
            validate=None if data.validation is None else self._validator(values, *data.validation),
            checkpoint=open_checkpoint(file, self.bundle, phase, fields, self.state, values, options),
        )
        try:
            with locating(self.bundle, fields.arrays):
                history = fitting.run(self._feature_budget)
        except NonFiniteLossError:
            # The only error after which the values are worth keeping: they are the last ones with a finite loss.
            self._model.take(values)
            raise
        self._model.take(values)
        return history

    def run_round(
        self, data: RoundData, options: RoundOptions, hooks: Hooks, randomness: Randomness | None = None
    ) -> LocalUpdate:
        """As `local_round`, with its options in one struct."""
        schedule = self.bundle.manifest.schedule
        need_program(self.bundle, "finish", "take part in a round")
        if not schedule:
            raise RuntimeProgramError(f"bundle {self.bundle.manifest.name!r} has no schedule, so no local round")
        # Without a copy: adopt() replaces arrays and never changes one.
        start = self._model.parameters if data.parameters is None else self._model.check_complete(data.parameters)
        fields = collect_data(self.bundle, schedule, data.x, data.y)
        values = Values(
            self.bundle,
            start,
            self.state,
            broadcast=data.broadcast,
            hyperparameters=options.hyperparameters,
            seed=options.seed,
            examples=fields.count,
            randomness=randomness,
        )
        update = run_round(
            self._sessions,
            self.bundle,
            values,
            fields,
            watch=Watch(call_all(hooks.callbacks)),
            feature_budget=self._feature_budget,
        )
        # Last: a round that fails anywhere leaves no trace in the device's state.
        self._model.keep_state(values)
        return update

    # --- inside ---------------------------------------------------------------------------------------------------

    def _phase(self, options: FitOptions) -> Phase:
        """The one phase of a fit. Raises RuntimeInputError, RuntimeProgramError."""
        name = options.program or need_program(self.bundle, "train", "learn")
        program = self.bundle.program(name)
        if program.steps > 1:
            raise RuntimeInputError(
                f"program {name!r} makes {program.steps} steps at once; name {program.repeats!r}: where it can, "
                "the runtime runs this program for several steps of that one"
            )
        moves = None if options.moves is None else self._model.check_writable(name, options.moves)
        return Phase(program=name, epochs=options.epochs, batch_size=options.batch_size, moves=moves)

    def _values(
        self,
        *,
        broadcast: Arrays | None = None,
        hyperparameters: Mapping[str, float] | None = None,
        seed: int = 0,
        examples: int = 0,
    ) -> Values:
        return Values(
            self.bundle,
            self._model.parameters,
            self.state,
            broadcast=broadcast,
            hyperparameters=hyperparameters,
            seed=seed,
            examples=examples,
        )

    def _validator(
        self, values: Values, x: np.ndarray | Arrays, y: np.ndarray | None
    ) -> Callable[[], dict[str, float]]:
        """What measures the values of a fit on these examples. Raises as `evaluate`, now and not after an epoch."""
        fields = collect("validation", evaluation_fields(self.bundle), x, y).arrays

        def validate() -> dict[str, float]:
            predictor = self._model.new_predictor(self._sessions, values)
            return self._evaluate(predictor, values, fields, None, batch_size=256)

        return validate

    def _evaluate(
        self, predictor: Predictor, values: Values, x: np.ndarray | Arrays, y: np.ndarray | None, batch_size: int
    ) -> dict[str, float]:
        session = self._sessions.get(need_program(self.bundle, "evaluate", "evaluate"))
        return evaluate(self.bundle, predictor, session, values, x, y, batch_size)
