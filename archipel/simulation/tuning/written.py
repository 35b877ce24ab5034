"""Writes the best settings that a tuning found as a federation's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from archipel.durable import write_durably
from archipel.errors import MissingExtraError, SimulationError
from archipel.simulation.federation import load_federation
from archipel.simulation.federation_parts.settings import Settings
from archipel.simulation.tuning.result import Tuning
from archipel.simulation.tuning.settings import as_settings
from archipel.toml_files import put_setting, read_toml


def write_best(tuning: Tuning, file: Path, target: Path, settings: Sequence[str] = ()) -> None:
    """Write the file with the best trial's values into `target`, which is replaced.

    Arguments:
        tuning: of that file.
        file: the federation's file that was tuned.
        target: lies in the same folder, since the paths in the file are relative to it.
        settings: KEY=VALUE in place of the file's, as they were tuned with.

    Raises SimulationError for a target elsewhere, or that is the file itself; MissingExtraError without
    `archipel[tuning]`.
    """
    check_target_file(file, target)
    try:
        import tomli_w
    except ModuleNotFoundError:
        raise MissingExtraError("tomli_w", "tuning") from None
    table = read_toml(file)
    for setting in (*settings, *as_settings(tuning.best.values, Settings.__struct_fields__)):
        put_setting(table, setting, Settings.__struct_fields__, "rounds=5")
    table.pop("tune", None)
    best = tuning.best
    head = (
        f"# {tuning.metric} {best.value:.6g} after {best.rounds} rounds: the best of {len(tuning.trials)} trials that\n"
        f"# `archipel tune {file.name}` made.\n\n"
    )
    write_durably(target, (head + tomli_w.dumps(table)).encode(), 0o666)
    load_federation(target)


def check_target_file(file: Path, target: Path) -> None:
    """Raise SimulationError for a target in another folder than the file's, or that is the file itself."""
    if target.resolve().parent != file.resolve().parent:
        raise SimulationError(f"{target}: must lie beside {file}, since the paths in it are relative to its folder")
    if target.resolve() == file.resolve():
        raise SimulationError(f"{target}: is the file that is tuned; choose another name")
