"""The tensors that a device keeps for itself between rounds: personal ones, and state of lifetime "device"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from archipel.bundle import read_weights, write_weights
from archipel.durable import write_durably
from archipel.errors import TensorLayoutError

MAX_STATE_BYTES = 1 << 30

_PERSONAL = "personal/"
_STATE = "state/"


class DeviceState:
    """Personal tensors and device state by logical name, which never leave the device.

    Arrays are replaced and never changed in place, so `copy` copies only the mappings.

    Example:
        runtime = load("digits.bundle", trusted_keys, state=DeviceState.load("device.state"))
        runtime.local_round(x, y, seed=7)
        runtime.state.save("device.state")
    """

    def __init__(
        self,
        personal: Mapping[str, np.ndarray] | None = None,
        state: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.personal: dict[str, np.ndarray] = dict(personal or {})
        self.state: dict[str, np.ndarray] = dict(state or {})

    def copy(self) -> DeviceState:
        """A snapshot: later changes of this state do not reach it."""
        return DeviceState(self.personal, self.state)

    def encode(self) -> bytes:
        """The bytes of a safetensors file with the names `personal/NAME` and `state/NAME`."""
        tensors = {_PERSONAL + name: array for name, array in self.personal.items()}
        tensors.update({_STATE + name: array for name, array in self.state.items()})
        return write_weights(tensors)

    @classmethod
    def decode(cls, data: bytes | Path, max_bytes: int = MAX_STATE_BYTES) -> DeviceState:
        """Inverse of `encode`; the file at a path is mapped, not read. Raises TensorLayoutError."""
        result = cls()
        for key, array in read_weights(data, max_bytes).items():
            if key.startswith(_PERSONAL):
                result.personal[key.removeprefix(_PERSONAL)] = array
            elif key.startswith(_STATE):
                result.state[key.removeprefix(_STATE)] = array
            else:
                raise TensorLayoutError(f"device state: tensor {key!r} is neither {_PERSONAL}... nor {_STATE}...")
        return result

    def save(self, path: Path | str) -> None:
        """Replace the file, atomically and durably, readable by its owner only. Raises OSError."""
        write_durably(Path(path), self.encode())

    @classmethod
    def load(cls, path: Path | str, max_bytes: int = MAX_STATE_BYTES) -> DeviceState:
        """The state in the file, an empty one without a file.

        Raises TensorLayoutError for one that is damaged, or has more than `max_bytes` bytes.
        """
        path = Path(path)
        return cls.decode(path, max_bytes) if path.exists() else cls()
