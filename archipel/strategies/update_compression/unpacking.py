"""The server's side of update compression: the changes of parameters from the sum of packed ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from archipel.bundle import Manifest
from archipel.bundle.carried import LEFT, RIGHT, UPDATE_SEED
from archipel.bundle.roles import Hyperparameter, LowRank, Rotation, Update
from archipel.protocol.noised.rotation import unrotate
from archipel.protocol.uploads import upload_program
from archipel.protocol.vector import DecodedSum
from archipel.strategies.update_compression.low_rank import expand


def carried(manifest: Manifest) -> list[Update]:
    """The update entries that carry the changes of parameters in another form."""
    outputs = upload_program(manifest, "training").outputs
    return [port for port in outputs if isinstance(port, Update) and port.carries is not None]


def round_seed(manifest: Manifest, number: int) -> dict[str, float]:
    """The hyperparameter with the public seed of round `number`; none where the bundle's `finish` reads none.

    It is the round's number, of which the hash makes the seed: it has to differ from round to round, and everybody may
    know it.
    """
    port = _seed_port(manifest)
    return {} if port is None else {UPDATE_SEED: float(number % int(port.maximum + 1))}


def unpack_deltas(
    manifest: Manifest,
    total: DecodedSum,
    hyperparameters: Mapping[str, float],
    bases: Mapping[str, np.ndarray] | None = None,
) -> DecodedSum:
    """The sum with the deltas of parameters in place of those that carry them.

    Arguments:
        manifest: the bundle's.
        total: the decoded and checked sum, by tensor name.
        hyperparameters: of the round's plan.
        bases: those of low-rank updates that the devices had.
    """
    bases = bases or {}
    ports = carried(manifest)
    if not ports:
        return total
    shapes = {spec.name: tuple(map(int, spec.shape)) for spec in manifest.parameters}
    deltas = dict(total.deltas)
    for port in ports:
        assert port.carries is not None
        if isinstance(port.carries, LowRank):
            (name,) = port.carries.parameters
            matrix = expand(deltas.pop(port.tensor), bases[LEFT + name], bases[RIGHT + name])
            deltas[name] = matrix.reshape(shapes[name])
            continue
        names = port.carries.parameters
        sizes = [math.prod(shapes[name]) for name in names]
        vector = deltas.pop(port.tensor)
        if isinstance(port.carries, Rotation):
            vector = unrotate(vector, port.carries, sum(sizes), _seed_of(manifest, hyperparameters))
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        deltas |= {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}
    return dataclasses.replace(total, deltas=deltas)


def _seed_of(manifest: Manifest, hyperparameters: Mapping[str, float]) -> int:
    port = _seed_port(manifest)
    return int(hyperparameters.get(UPDATE_SEED, 0.0 if port is None else port.default))


def _seed_port(manifest: Manifest) -> Hyperparameter | None:
    ports = upload_program(manifest, "training").inputs
    return next((port for port in ports if isinstance(port, Hyperparameter) and port.name == UPDATE_SEED), None)
