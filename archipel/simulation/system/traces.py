"""Traces of devices from files of one's own."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from archipel.errors import ArchipelError, SimulationError
from archipel.library_errors import one_line
from archipel.simulation.system.settings import Device, System

MOST_DEVICES = 100_000
MOST_BYTES = 64 << 20
_COLUMNS = ("seconds_per_step", "down", "up", "windows")


def read_devices(path: Path | str) -> tuple[Device, ...]:
    r"""The devices of a trace.

    A .csv has the columns seconds_per_step, down, up (bytes per second; empty: no limit) and, if wanted, windows, such
    as `0-3600;7200-9000`, in seconds from the beginning of a period. A .toml has a table [[device]] for each device
    with the same names, and windows as pairs of numbers.

    Raises SimulationError that names the file and the row.

    Example:
        Path("phones.csv").write_text("seconds_per_step,down,up\n0.1,1e6,2.5e5\n0.4,2e5,\n")
        print([each.seconds_per_step for each in read_devices("phones.csv")])  # [0.1, 0.4]
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SimulationError(
                f"{path}: has more than {MOST_BYTES >> 20} MB; give fewer devices, they are used again"
            )
        if path.suffix == ".toml":
            devices = msgspec.toml.decode(path.read_bytes(), type=_Tables).device
        elif path.suffix == ".csv":
            devices = _read_csv(path)
        else:
            raise SimulationError(f"{path}: a trace is a .csv or a .toml")
    except SimulationError as error:
        raise SimulationError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    except OSError as error:
        raise SimulationError(f"{path}: cannot be read ({error.strerror})") from None
    except (ArchipelError, ValueError, csv.Error, RecursionError) as error:
        raise SimulationError(f"{path}: {one_line(error)}") from None
    if not 1 <= len(devices) <= MOST_DEVICES:
        raise SimulationError(f"{path}: has {len(devices)} devices; a trace has 1 to {MOST_DEVICES}")
    return devices


def with_devices(system: System, folder: Path = Path()) -> System:
    """The system with the devices of its file, whose name is relative to the folder."""
    if not isinstance(system.devices, str):
        return system
    return msgspec.structs.replace(system, devices=read_devices(folder / system.devices))


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: tuple[Device, ...]


def _read_csv(path: Path) -> tuple[Device, ...]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        names = tuple(rows.fieldnames or ())
        if "seconds_per_step" not in names or not set(names) <= set(_COLUMNS) or len(set(names)) != len(names):
            raise SimulationError(f"its columns are {', '.join(names)}; a trace has {', '.join(_COLUMNS)}")
        devices: list[Device] = []
        for row in rows:
            if len(devices) == MOST_DEVICES:
                raise SimulationError(f"has more than {MOST_DEVICES} devices; give fewer, they are used again")
            try:
                devices.append(_device(row))
            except (ValueError, SimulationError) as error:
                raise SimulationError(f"line {rows.line_num}: {error}") from None
    return tuple(devices)


def _device(row: dict[str | None, str | None]) -> Device:
    if None in row or None in row.values():
        raise SimulationError("has not as many values as the file has columns")
    numbers = {name: float(text) for name, text in row.items() if name not in (None, "windows") and text}
    windows = []
    for window in filter(None, (row.get("windows") or "").split(";")):
        start, dash, end = window.partition("-")
        if not dash:
            raise SimulationError(f"windows: {window!r} is not START-END")
        windows.append((float(start), float(end)))
    return msgspec.convert({**numbers, "windows": windows}, Device, strict=True)
