"""The values that the ports of programs read and write, by role: the memory of one local round or fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from archipel.bundle import Bundle
from archipel.bundle.roles import (
    Broadcast,
    Count,
    Hyperparameter,
    Noise,
    Parameter,
    Personal,
    Port,
    Seed,
    Start,
    State,
    Step,
    role_of,
)
from archipel.errors import RuntimeInputError, RuntimeProgramError, TensorLayoutError
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.fields import check_array, describe
from archipel.lite_runtime.learned import join_names, split_names
from archipel.lite_runtime.noise import DiscreteGaussian, Randomness


class Values:
    """Parameters, personal tensors, state and everything else that ports name, from the start of a round to its end.

    `device` changes only in `keep()`, so a round that ends in an error leaves no trace.
    """

    def __init__(
        self,
        bundle: Bundle,
        parameters: Mapping[str, np.ndarray],
        device: DeviceState,
        *,
        broadcast: Mapping[str, np.ndarray] | None = None,
        hyperparameters: Mapping[str, float] | None = None,
        seed: int = 0,
        examples: int = 0,
        randomness: Randomness | None = None,
    ) -> None:
        self._bundle = bundle
        self._device = device
        self.broadcast = dict(broadcast or {})
        self._hyperparameters = check_hyperparameters(bundle, hyperparameters or {})
        self._randomness = randomness
        self._samplers: dict[str, DiscreteGaussian] = {}
        self._states: dict[str, np.ndarray] = {}
        self._device_states: set[str] = set()
        self._personal: dict[str, np.ndarray] = {}
        self.start = dict(parameters)
        self.parameters = dict(parameters)
        self.seed = seed
        self.examples = examples
        self.steps = 0

    def read(self, port: Port) -> np.ndarray:
        """The port's present value. Raises RuntimeInputError or RuntimeProgramError if it has none."""
        match port:
            case Parameter():
                return self.parameters[port.tensor]
            case Start():
                return self.start[port.tensor]
            case Personal():
                return self._personal_tensor(port)
            case State():
                return self._state(port)
            case Broadcast():
                return self._broadcast_tensor(port)
            case Hyperparameter():
                return np.asarray(self._hyperparameters.get(port.name, port.default), dtype=port.dtype)
            case Count():
                return np.asarray(self.examples if port.of == "examples" else self.steps, dtype=port.dtype)
            case Step():
                return np.asarray(self.steps, dtype=port.dtype)
            case Seed():
                # By way of uint32, so that a signed input gets the same 32 bits.
                return np.asarray(self.seed, dtype=np.uint32).astype(port.dtype)
            case Noise():
                return self._noise(port)
        raise RuntimeProgramError(f"a {role_of(port)!r} input ({port.name!r}) has no value outside a batch")

    def write(self, port: Port, array: np.ndarray) -> None:
        """Store a program's output of role parameter, personal or state. The array must not change afterwards."""
        if isinstance(port, Parameter):
            self.parameters[port.tensor] = array
        elif isinstance(port, Personal):
            self._personal[port.tensor] = array
        # State of lifetime "step" is not kept: every step starts from its initial value.
        elif isinstance(port, State) and port.lifetime != "step":
            self._states[port.tensor] = array
            if port.lifetime == "device":
                self._device_states.add(port.tensor)

    def keep(self) -> None:
        """Move the personal tensors and the state that outlives the round to the device's state."""
        self._device.personal.update(self._personal)
        self._device.state.update({name: self._states[name] for name in self._device_states})

    def export(self) -> dict[str, np.ndarray]:
        """The tensors that have changed since the start: `parameter/NAME`, `personal/NAME`, `state/NAME`."""
        # By identity: `write` stores new arrays, and comparing values would read the whole mapped file.
        moved = {n: array for n, array in self.parameters.items() if array is not self.start[n]}
        return join_names({"parameter": moved, "personal": self._personal, "state": self._states})

    def restore(self, tensors: Mapping[str, np.ndarray], steps: int) -> None:
        """Restore what `export` gave after `steps` steps. Raises TensorLayoutError for tensors of another bundle."""
        groups = split_names(tensors, ("parameter", "personal", "state"))
        # The manifest declares a tensor alike in all programs, so any of its ports will do.
        ports: dict[tuple[str, str], Port] = {}
        for program in self._bundle.manifest.programs.values():
            for port in (*program.inputs, *program.outputs):
                if isinstance(port, Parameter | Personal | State):
                    ports[role_of(port), port.tensor] = port
        for role, group in groups.items():
            for name, array in group.items():
                known = ports.get((role, name))
                if known is None or not _fits(known, array):
                    expected = "no such tensor in this bundle" if known is None else f"expected {describe(known)}"
                    raise TensorLayoutError(f"{role} {name!r}: {array.dtype.name}{list(array.shape)}, {expected}")
                self.write(known, array)
        self.steps = steps

    def _personal_tensor(self, port: Personal) -> np.ndarray:
        # In this order: this round's, the device's, the published initial value.
        value = self._personal.get(port.tensor)
        if value is None:
            value = self._device.personal.get(port.tensor)
            if value is None or not _fits(port, value):
                # Without `init`, the parameter or published tensor of the same name.
                init = port.init or port.tensor
                first = self.start[init] if init in self.start else self._bundle.tensor(init)
                value = _check_shaped(port, first, f"initial value {init!r}")
            self._personal[port.tensor] = value
        return value

    def _state(self, port: State) -> np.ndarray:
        if port.lifetime == "step":
            return self._initial_state(port)
        value = self._states.get(port.tensor)
        if value is None:
            if port.lifetime == "device":
                value = self._device.state.get(port.tensor)
                if value is not None and not _fits(port, value):
                    # Left by another version of the model, and of no use to this one.
                    value = None
                # Also when it is only read: `keep` then stores its initial value.
                self._device_states.add(port.tensor)
            self._states[port.tensor] = value = self._initial_state(port) if value is None else value
        return value

    def _initial_state(self, port: State) -> np.ndarray:
        if isinstance(port.init, str):
            return _check_shaped(port, self._bundle.tensor(port.init), f"initial value {port.init!r}")
        if port.init == 0:
            return np.zeros(fixed_shape(port), dtype=port.dtype)  # takes no memory until it is written
        return np.full(fixed_shape(port), port.init, dtype=port.dtype)

    def _broadcast_tensor(self, port: Broadcast) -> np.ndarray:
        value = self.broadcast.get(port.tensor)
        if value is None:
            given = ", ".join(sorted(self.broadcast)) or "none"
            raise RuntimeInputError(
                f"broadcast {port.tensor!r} ({describe(port)}) is missing; it comes from the server with the round. "
                f"Given: {given}"
            )
        check_array(f"broadcast {port.tensor!r}", port, value)
        return value

    def _noise(self, port: Noise) -> np.ndarray:
        check_noise(port)
        sampler = self._samplers.get(port.name)
        if sampler is None:
            source = {} if self._randomness is None else {"randomness": self._randomness}
            # One sampler for each port, since it buffers random bytes.
            sampler = self._samplers[port.name] = DiscreteGaussian(port.scale, **source)
        shape = fixed_shape(port)
        return sampler.sample(math.prod(shape)).reshape(shape).astype(port.dtype)


def check_hyperparameters(bundle: Bundle, given: Mapping[str, float]) -> dict[str, float]:
    """Returns the values. Raises RuntimeInputError for a name that no program has, or a value outside its bounds."""
    known = {
        port.name: port
        for program in bundle.manifest.programs.values()
        for port in program.inputs
        if isinstance(port, Hyperparameter)
    }
    for name, value in given.items():
        port = known.get(name)
        if port is None:
            names = ", ".join(sorted(known)) or "none"
            raise RuntimeInputError(f"hyperparameter {name!r} is not one of this bundle's: {names}")
        if not port.minimum <= value <= port.maximum:
            raise RuntimeInputError(
                f"hyperparameter {name!r} must be from {port.minimum:g} to {port.maximum:g}, got {value:g}"
            )
    return dict(given)


def check_noise(port: Noise) -> None:
    """Raises RuntimeProgramError for a distribution that cannot be sampled exactly."""
    if port.distribution != "discrete_gaussian":
        raise RuntimeProgramError(
            f"noise {port.name!r}: this runtime draws only discrete_gaussian, not {port.distribution}: samples of "
            "floating-point Gaussians leak what they should hide (Mironov 2012); convert with discrete_gaussian"
        )


def fixed_shape(port: Port, first: int = 0) -> tuple[int, ...]:
    """The port's shape from axis `first` on. Raises RuntimeProgramError for a symbolic dimension there."""
    shape = tuple(dim for dim in port.shape[first:] if isinstance(dim, int))
    if len(shape) != len(port.shape[first:]):
        raise RuntimeProgramError(f"{role_of(port)} {port.name!r} must have a fixed shape, has {describe(port)}")
    return shape


def _fits(port: Port, value: np.ndarray) -> bool:
    return value.dtype.name == port.dtype and value.shape == tuple(port.shape)


def _check_shaped(port: Port, value: np.ndarray, what: str) -> np.ndarray:
    if not _fits(port, value):
        raise RuntimeProgramError(
            f"{role_of(port)} {port.name!r}: {what} is {value.dtype.name}{list(value.shape)}, expected {describe(port)}"
        )
    return value
