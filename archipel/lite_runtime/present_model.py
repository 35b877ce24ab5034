"""The present model of this device: its parameters, the device's own tensors, and a predictor of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from archipel.bundle import Bundle
from archipel.bundle.roles import Derived, Parameter, Personal, State
from archipel.errors import RuntimeInputError
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.fields import check_array
from archipel.lite_runtime.learned import join_names, split_names
from archipel.lite_runtime.predictor import Predictor
from archipel.lite_runtime.training.driver import find_program, need_program, run_once
from archipel.lite_runtime.values import Values

Arrays = Mapping[str, np.ndarray]


class PresentModel:
    """Every change happens under a lock, so that a predictor made in another thread never has half of a change."""

    def __init__(self, bundle: Bundle, state: DeviceState) -> None:
        self.bundle = bundle
        self.state = state
        self.parameters: dict[str, np.ndarray] = bundle.parameters()
        self.predictor: Predictor | None = None
        """None since the last change, until the next prediction."""
        self._published = True
        self._lock = threading.RLock()

    def make_predictor(self, sessions: Sessions) -> Predictor:
        """The predictor of the present model; makes it if there is none."""
        with self._lock:
            if self.predictor is None:
                self.predictor = self.new_predictor(sessions)
            return self.predictor

    def new_predictor(self, sessions: Sessions, values: Values | None = None) -> Predictor:
        """A new predictor that runs in `sessions`, of the present model, or of `values` in the middle of a fit.

        Raises RuntimeProgramError without a predict program.
        """
        name = need_program(self.bundle, "predict", "predict")
        # Under the lock, because it reads parameters and state, of which another thread may change one after the other.
        with self._lock:
            if values is None:
                values = Values(self.bundle, self.parameters, self.state)
                derived = {} if self._is_published() else self.derived(sessions, values)
            else:
                derived = self.derived(sessions, values)
            session = sessions.open(name, derived) if derived else sessions.get(name)
            return Predictor(session, self.bundle.program(name), values)

    def derived(self, sessions: Sessions, values: Values) -> dict[str, np.ndarray]:
        """What `refresh` computes from `values`: initializers of `predict` by name, {} without such a program."""
        refresh = find_program(self.bundle, "refresh")
        if refresh is None:
            return {}
        program = self.bundle.program(refresh)
        outputs = run_once(sessions, self.bundle, refresh, values)
        return {port.tensor: outputs[port.name] for port in program.outputs if isinstance(port, Derived)}

    def take(self, values: Values) -> None:
        """Take over the parameters and device tensors that training left in `values`."""
        with self._lock:
            values.keep()
            self.adopt(values.parameters)

    def keep_state(self, values: Values) -> None:
        """Take over the personal tensors and state that training left in `values`; the parameters stay."""
        with self._lock:
            values.keep()
            # Personal tensors are inputs of `predict`, bound in the predictor.
            self.predictor = None

    def adopt(self, parameters: Arrays) -> None:
        """Replace some or all parameters by checked arrays, which nobody may change from now on."""
        with self._lock:
            for name, array in parameters.items():
                # An array that is here already is read-only.
                if array is not self.parameters[name]:
                    self._published = False
                    array.flags.writeable = False
                self.parameters[name] = array
            self.predictor = None

    def check_parameters(self, parameters: Arrays) -> dict[str, np.ndarray]:
        """The parameters, copied where they are writable. Raises RuntimeInputError for a wrong name, dtype or shape."""
        specs = {spec.name: spec for spec in self.bundle.manifest.parameters}
        checked = {}
        for name, array in parameters.items():
            spec = specs.get(name)
            if spec is None:
                raise RuntimeInputError(
                    f"parameter {name!r} is not one of bundle {self.bundle.manifest.name!r}: {', '.join(specs)}"
                )
            port = Parameter(name=name, tensor=name, dtype=spec.dtype, shape=spec.shape)
            check_array("parameters", port, array)
            # The caller may go on writing to a writable array.
            checked[name] = array.copy() if array.flags.writeable else array
        return checked

    def check_complete(self, parameters: Arrays) -> dict[str, np.ndarray]:
        """As `check_parameters`. Raises RuntimeInputError also if some are missing."""
        missing = [name for name in self.parameters if name not in parameters]
        if missing:
            raise RuntimeInputError(f"parameters: {', '.join(missing)} missing; a round starts from all of them")
        return self.check_parameters(parameters)

    def reset(self, what: str) -> None:
        """Remove the "personal" tensors or the device's "state", or go back to the bundle's own "parameters"."""
        with self._lock:
            if what == "parameters":
                self.parameters = self.bundle.parameters()
                self._published = True
            elif what == "personal":
                self.state.personal.clear()
            elif what == "state":
                self.state.state.clear()
            else:
                raise RuntimeInputError(f"reset: expected 'personal', 'state' or 'parameters', got {what!r}")
            self.predictor = None

    def learned(self) -> dict[str, np.ndarray]:
        """The tensors that differ from the bundle's: `parameter/NAME`, `personal/NAME`, `state/NAME`."""
        with self._lock:
            # Identity first: it spares reading the published tensors that nothing has replaced.
            published = self.bundle.parameters()
            moved = {
                name: array
                for name, array in self.parameters.items()
                if array is not published[name] and not np.array_equal(array, published[name])
            }
            return join_names({"parameter": moved, "personal": self.state.personal, "state": self.state.state})

    def restore(self, learned: Arrays) -> None:
        """Restore what `learned` returned. Raises TensorLayoutError, RuntimeInputError."""
        groups = split_names(learned, ("parameter", "personal", "state"))
        # Checked before anything changes: an error leaves the model as it was.
        parameters = self.check_parameters(groups["parameter"])
        with self._lock:
            self.state.personal.update(groups["personal"])
            self.state.state.update(groups["state"])
            self.adopt(parameters)

    def check_writable(self, program: str, names: Sequence[str]) -> tuple[str, ...]:
        """`names` if the program writes all of them. Raises RuntimeInputError."""
        ports = self.bundle.program(program).outputs
        written = [port.tensor for port in ports if isinstance(port, Parameter | Personal)]
        for tensor in names:
            if tensor not in written:
                raise RuntimeInputError(f"moves: {tensor!r} is not one that {program!r} writes: {', '.join(written)}")
        return tuple(names)

    def _is_published(self) -> bool:
        """Whether no input of `refresh` has changed since conversion, so that the graph's initializers are right."""
        refresh = find_program(self.bundle, "refresh")
        ports = () if refresh is None else self.bundle.program(refresh).inputs
        return self._published and not any(
            (isinstance(port, Personal) and port.tensor in self.state.personal)
            or (isinstance(port, State) and port.tensor in self.state.state)
            for port in ports
        )
