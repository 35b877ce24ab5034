"""A run's folder: where its simulation stands, so that it goes on after it was stopped or killed.

The arrays of a round lie in a file of their own; `history.json`, written last and replaced as a whole, names the round.
So a kill between any two steps, or a power cut, leaves the round before it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Bundle, read_weights, write_weights
from archipel.durable import make_folder, open_locked, sync_many, write_durably
from archipel.errors import ArchipelError, LockedError, SimulationError
from archipel.lite_runtime.learned import join_names, read_parameters, split_names
from archipel.simulation.result import ClientRow
from archipel.simulation.rounds import RoundRow, RoundSettings, Standing
from archipel.simulation.system.round_clock import ClockState

HISTORY = "history.json"
VERSIONS = "versions"
"""The folder in it with what the server had after each round."""
STATES = "states"
"""The folder in it with what devices keep, see `states.py`."""
_REFUSED = {
    "bundle": "another model, training or strategy",
    "population": "another number of devices",
    "examples": "other examples",
    "settings": "other settings of its rounds",
}
_GROUPS = ("parameter", "state", "rule", "noise")


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `history.json` holds. `examples` is a fingerprint of the data, `engine` the way in which the rounds were run
    so far, which a run keeps to. `rested`: as of Standing."""

    bundle: str
    population: int
    examples: str
    settings: RoundSettings
    engine: str
    rows: list[RoundRow]
    clients: list[ClientRow] = []
    clock: ClockState = msgspec.field(default_factory=ClockState)
    rested: list[list[int]] = []


def make(folder: Path) -> None:
    """Make the folder where it does not exist. Raises SimulationError where that fails, or it cannot be written to."""
    try:
        make_folder(folder)
        os.close(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise SimulationError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder, made where it does not exist, for this run alone. Raises SimulationError where another one has it."""
    make(folder)
    try:
        handle = open_locked(folder / "lock")
    except LockedError:
        raise SimulationError(f"{folder}: another run uses it now; wait for its end, or give another folder") from None
    try:
        yield
    finally:
        os.close(handle)


def save(folder: Path, record: Record, standing: Standing) -> None:
    """Write the standing after the last of the rows; it is on disk on return, and so is what devices keep."""
    number, record.clock, record.rested = len(record.rows), standing.clock, standing.rested
    file = _arrays(folder, number)
    past = {f"version-{version}": tensors for version, tensors in standing.past.items()}
    tensors = join_names(
        {
            "parameter": standing.parameters,
            "state": standing.strategy_state,
            "rule": standing.rule_state,
            "noise": {f"{place:02}": noise for place, noise in enumerate(standing.noise)},
            **past,
        }
    )
    write_durably(file, write_weights(tensors))
    # Before the history counts the round: processes write these files without syncing them.
    if (folder / STATES).exists():
        sync_many(folder / STATES)
    write_durably(folder / HISTORY, msgspec.json.format(msgspec.json.encode(record)))
    for old in folder.glob("round-*.safetensors"):
        if old != file:
            old.unlink(missing_ok=True)


def keep_version(folder: Path, number: int, parameters: Mapping[str, NDArray[Any]]) -> None:
    """Write what the server has after that round, as `archipel task download ID versions --rounds` does."""
    (folder / VERSIONS).mkdir(exist_ok=True)
    write_durably(_arrays(folder / VERSIONS, number), write_weights(parameters))


def load(folder: Path, expected: Record, bundle: Bundle) -> tuple[Record, Standing] | None:
    """The run in the folder, None if it has none.

    Raises SimulationError for the run of another bundle, other clients or other settings, and for a damaged file, such
    as one whose tensors have other names, shapes or dtypes than the bundle's.
    """
    path = folder / HISTORY
    if not path.exists():
        return None
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        tensors = read_weights(_arrays(folder, len(record.rows)).read_bytes())
        if [row.number for row in record.rows] != list(range(1, len(record.rows) + 1)):
            raise SimulationError("its rounds are not numbered from 1")
        versions = sorted({flight.version for flight in record.clock.flights})
        groups = split_names(tensors, [*_GROUPS, *(f"version-{version}" for version in versions)])
        for group in ("parameter", *(f"version-{version}" for version in versions)):
            read_parameters(groups[group], bundle)
        if any(each.dtype != np.int64 or each.ndim != 1 for each in groups["noise"].values()):
            raise SimulationError("its noise is not of whole numbers")
    except (msgspec.MsgspecError, OSError, ArchipelError, RecursionError) as error:
        raise SimulationError(f"{folder}: its run cannot be read ({error}); remove the folder to begin anew") from None
    for name, what in _REFUSED.items():
        if getattr(record, name) != getattr(expected, name):
            raise SimulationError(f"{folder}: has a run with {what}; give another folder, or remove it to begin anew")
    past = {version: groups[f"version-{version}"] for version in versions}
    noise = [groups["noise"][place] for place in sorted(groups["noise"])]
    return record, Standing(
        groups["parameter"], groups["state"], record.rows, record.clock, past, groups["rule"], noise, record.rested
    )


def _arrays(folder: Path, number: int) -> Path:
    return folder / f"round-{number}.safetensors"
