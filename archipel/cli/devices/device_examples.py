"""A device's local examples: a file that its owner provides, or the device's encrypted store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import click
import numpy as np

from archipel.bundle import read_weights
from archipel.cli.devices.site_data import arrange, read_table
from archipel.cli.input_output.arrays import MAX_BYTES, read_arrays
from archipel.client.memory.erasing import EXAMPLES
from archipel.client.memory.folder import lock_folder
from archipel.client.memory.keystore import DATA_KEY, FileKeys, data_key
from archipel.client.settings import DeviceSettings, ExampleSettings, load_device_settings
from archipel.errors import ArchipelError, ClientError, CommandError
from archipel.lite_runtime.store.duplicates import lacking
from archipel.lite_runtime.store.example_store import ExampleStore

ARRAYS = (".npz", ".safetensors")
"""What is read without `archipel.datasets`, with the types that it has."""


@click.group()
def examples() -> None:
    """Fill the device's encrypted store of examples (setting `examples.store`).

    \b
    archipel device examples add device.toml data.npz
    """


@examples.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--duplicates", is_flag=True, help="Add also examples that the store holds already.")
def add(config: Path, data: Path, duplicates: bool) -> None:
    """Add the examples in DATA, an .npz or .safetensors file with an array for each field and one row for each example.

    \b
    archipel device examples add device.toml data.npz

    Examples that the store holds already, equal in every field, are left out, so a file may be added again when it has
    grown. An agent may be at work meanwhile. The oldest examples go when the store is full (`examples.max_bytes`).
    DATA stays where it is: remove it if nobody else is to read it.
    """
    settings = load_device_settings(config)
    if settings.examples is None or not settings.examples.store:
        raise CommandError(f"{settings.file}: the device has no store; set store = true in [examples]")
    arrays = _read(data)
    with _store(settings.config.folder, settings.examples) as store:
        count = len(next(iter(arrays.values())))
        chosen = np.arange(count) if duplicates else lacking(store, arrays)
        if len(chosen):
            store.add_many({name: array[chosen] for name, array in arrays.items()})
        held = count - len(chosen)
        left_out = f" ({held} were there; --duplicates adds them again)" if held else ""
        click.echo(f"{len(chosen)} examples added{left_out}, {len(store)} in the store, {store.nbytes} bytes sealed")
    not_finite = _count_not_finite(arrays)
    if not_finite:
        click.echo(
            f"{data}: {not_finite} examples have numbers that are not finite, at which training may stop", err=True
        )


def _count_not_finite(arrays: Mapping[str, np.ndarray]) -> int:
    """How many examples have a number that is NaN or infinite."""
    # One array of bools per field, True for an example whose row has such a number; integers have none.
    unusable = [
        ~np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
        for array in arrays.values()
        if array.dtype.kind == "f"
    ]
    return int(np.logical_or.reduce(unusable).sum()) if unusable else 0


class LocalExamples:
    """The function that an agent calls for its examples."""

    def __init__(self, settings: DeviceSettings) -> None:
        """Take the place of the examples from the settings. Raises CommandError where they name none."""
        if settings.examples is None:
            raise CommandError(
                f'{settings.file}: no examples to learn from; set file = "data.npz" or store = true in [examples]'
            )
        self._where = settings.examples
        self._config = settings.config
        self._remedy = (
            f"; put a file with an array for each field of the model there, or set another one in [examples] of "
            f"{settings.file}"
        )

    def check(self) -> None:
        """Raise ArchipelError where the examples cannot be read. A store may be empty yet."""
        if self._where.store:
            _store(self._config.folder, self._where).close()
        else:
            self._read()

    def __call__(self) -> Mapping[str, np.ndarray]:
        try:
            if not self._where.store:
                return self._read()
            with _store(self._config.folder, self._where) as store:
                return store.arrays(limit_bytes=self._config.max_peak_bytes)
        except ArchipelError as error:
            # A ClientError makes the device leave the round with this reason, and the agent goes on: the owner may
            # repair the file before the next round.
            raise ClientError(f"examples: {error}") from None

    def _read(self) -> dict[str, np.ndarray]:
        path = Path(self._where.file)
        if self._where.file and (path.suffix in ARRAYS or not path.exists()):
            arrays = _read(path, self._remedy)
            return arrange(arrays, self._where.fields, self._where.file) if self._where.fields else arrays
        return read_table(self._where, self._config.max_peak_bytes)


def _store(folder: Path, settings: ExampleSettings) -> ExampleStore:
    keys = FileKeys(folder)
    if keys.load(DATA_KEY) is None:
        # The key is made under the folder's lock, so that two processes do not make two. If the lock is taken, its
        # holder is an agent, which has made the key.
        with suppress(ClientError):
            lock = lock_folder(folder)
            try:
                data_key(keys)
            finally:
                os.close(lock)
    return ExampleStore.open(
        folder / EXAMPLES,
        data_key(keys),
        max_bytes=settings.max_bytes,
        max_age=timedelta(seconds=settings.max_age),
    )


def _read(path: Path, remedy: str = "") -> dict[str, np.ndarray]:
    try:
        return _arrays(path)
    except OSError as error:
        raise CommandError(f"{path}: cannot be read ({error.strerror}){remedy}") from None


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".safetensors":
        # Copied: the arrays are views of a mapped file, and reading one that was cut short kills the process (SIGBUS).
        arrays = {name: np.array(array) for name, array in read_weights(path, MAX_BYTES).items()}
    else:
        content = read_arrays(path)
        if isinstance(content, np.ndarray):
            raise CommandError(f"{path}: one array without a name; give an .npz with an entry for each field")
        arrays = content
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if not arrays or len(set(counts.values())) != 1 or not min(counts.values()):
        raise CommandError(f"{path}: expected arrays with one row for each example, at least one, got lengths {counts}")
    return arrays
