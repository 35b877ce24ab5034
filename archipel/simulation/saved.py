"""A run's folder: where its simulation stands, so that it goes on after it was stopped or killed.

The arrays of a round lie in a file of their own; `history.json`, written last and replaced as a whole, names the round.
So a kill between any two steps leaves the round before it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from archipel.bundle import read_weights, write_weights
from archipel.durable import write_durably
from archipel.errors import ArchipelError, SimulationError
from archipel.lite_runtime.learned import join_names, split_names
from archipel.simulation.result import ClientRow
from archipel.simulation.rounds import RoundRow, RoundSettings, Standing
from archipel.simulation.system.round_clock import ClockState

HISTORY = "history.json"
_GROUPS = ("parameter", "state", "rule")


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `history.json` holds. `examples` is a fingerprint of the data, `engine` the way in which the rounds were run
    so far, which a run keeps to."""

    bundle: str
    population: int
    examples: str
    settings: RoundSettings
    engine: str
    rows: list[RoundRow]
    clients: list[ClientRow] = []
    clock: ClockState = msgspec.field(default_factory=ClockState)


def save(folder: Path, record: Record, standing: Standing) -> None:
    """Write the standing after the last of the rows; it is on disk on return."""
    number, record.clock = len(record.rows), standing.clock
    file = _arrays(folder, number)
    past = {f"version-{version}": tensors for version, tensors in standing.past.items()}
    tensors = join_names(
        {
            "parameter": standing.parameters,
            "state": standing.strategy_state,
            "rule": standing.rule_state,
            **past,
        }
    )
    write_durably(file, write_weights(tensors))
    write_durably(folder / HISTORY, msgspec.json.format(msgspec.json.encode(record)))
    for old in folder.glob("round-*.safetensors"):
        if old != file:
            old.unlink(missing_ok=True)


def load(folder: Path, expected: Record) -> tuple[Record, Standing] | None:
    """The run in the folder, None if it has none.

    Raises SimulationError for the run of another bundle, other clients or other settings, and for a damaged file.
    """
    path = folder / HISTORY
    if not path.exists():
        return None
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        tensors = read_weights(_arrays(folder, len(record.rows)).read_bytes())
        versions = sorted({flight.version for flight in record.clock.flights})
        groups = split_names(tensors, [*_GROUPS, *(f"version-{version}" for version in versions)])
    except (msgspec.MsgspecError, OSError, ArchipelError) as error:
        raise SimulationError(f"{folder}: its run cannot be read ({error}); remove the folder to begin anew") from None
    for name in ("bundle", "population", "examples", "settings"):
        if getattr(record, name) != getattr(expected, name):
            raise SimulationError(
                f"{folder}: has a run with another {name}; give another folder, or remove it to begin anew"
            )
    past = {version: groups[f"version-{version}"] for version in versions}
    return record, Standing(groups["parameter"], groups["state"], record.rows, record.clock, past, groups["rule"])


def _arrays(folder: Path, number: int) -> Path:
    return folder / f"round-{number}.safetensors"
