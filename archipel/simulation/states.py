"""What simulated devices keep from round to round: personal tensors and state such as control variates, on disk.

A file is named by its client and its round and never changed, so that a round that is simulated again after a kill
starts from the state before it. Files that no round can ask for any more are deleted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from archipel.lite_runtime import DeviceState


class StateFolder:
    """The states of all clients of a run, in one folder for each 1,000 clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: int, number: int) -> DeviceState:
        """The state that the client has before round `number`; an empty one if it has none."""
        before = [each for each in self._rounds(client) if each < number]
        # Read, not mapped: the file may be deleted while its arrays are in use.
        return DeviceState.decode(self._file(client, max(before)).read_bytes()) if before else DeviceState()

    def save(self, client: int, number: int, state: DeviceState, saved: int) -> None:
        """Keep the state that the client has after round `number`; a killed run goes on after round `saved`."""
        if not state.personal and not state.state:
            return
        rounds = self._rounds(client)
        file = self._file(client, number)
        file.parent.mkdir(parents=True, exist_ok=True)
        # Renamed, so that a kill leaves no half-written file under the name; `saved.save` syncs them, all at once. A
        # worker of a run that was just killed may still be writing: the name is this process's own.
        temporary = file.with_suffix(f".{os.getpid()}.new")
        temporary.write_bytes(state.encode())
        os.replace(temporary, file)
        for old in sorted(each for each in rounds if each <= saved)[:-1]:
            self._file(client, old).unlink(missing_ok=True)

    def _rounds(self, client: int) -> list[int]:
        found = self._file(client, 0).parent.glob(f"{client}-*.state")
        return [int(path.stem.partition("-")[2]) for path in found]

    def _file(self, client: int, number: int) -> Path:
        return self.folder / str(client // 1000) / f"{client}-{number}.state"


class MemoryStates:
    """The same in memory, for one process and runs that nobody resumes."""

    def __init__(self, states: Mapping[int, DeviceState] | None = None) -> None:
        self._states = dict(states or {})

    def load(self, client: int, number: int) -> DeviceState:
        return self._states.get(client, DeviceState()).copy()

    def save(self, client: int, number: int, state: DeviceState, saved: int) -> None:
        if state.personal or state.state:
            self._states[client] = state


States = StateFolder | MemoryStates
