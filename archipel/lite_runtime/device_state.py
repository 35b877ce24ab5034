"""What a device keeps for itself between rounds: personal tensors and state that lives as long as the device."""

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
    """Tensors by logical name. The arrays are replaced, never changed in place, so a copy of the maps is a snapshot."""

    def __init__(
        self,
        personal: Mapping[str, np.ndarray] | None = None,
        state: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.personal: dict[str, np.ndarray] = dict(personal or {})
        self.state: dict[str, np.ndarray] = dict(state or {})

    def copy(self) -> DeviceState:
        return DeviceState(self.personal, self.state)

    def encode(self) -> bytes:
        """Safetensors with the names `personal/NAME` and `state/NAME`."""
        tensors = {_PERSONAL + name: array for name, array in self.personal.items()}
        tensors.update({_STATE + name: array for name, array in self.state.items()})
        return write_weights(tensors)

    @classmethod
    def decode(cls, data: bytes | Path, max_bytes: int = MAX_STATE_BYTES) -> DeviceState:
        """Inverse of `encode`; a path is mapped. Raises TensorLayoutError."""
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
        """Write atomically and durably, readable by the owner alone."""
        write_durably(Path(path), self.encode())

    @classmethod
    def load(cls, path: Path | str, max_bytes: int = MAX_STATE_BYTES) -> DeviceState:
        """Empty where there is no file yet."""
        path = Path(path)
        return cls.decode(path, max_bytes) if path.exists() else cls()
