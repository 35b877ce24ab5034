"""The server's side of low-rank updates (Vogels, Karimireddy, Jaggi 2019, "PowerSGD"), with one exchange a round.

PowerSGD makes a step of power iteration for the mean M of the workers' matrices: P = M Q is summed, P' = orth(P) goes
back, and M^T P' is summed, from which M is taken to be P' (M^T P')^T. A round of a federation has one exchange. So
devices have both bases from the round before, L (n x r) and R (m x r), each with orthonormal columns, and send

    left = M R,   right = M^T L

which are linear in M, so the server gets those of the sum. It takes for M the part whose columns lie in the span of L
or whose rows lie in that of R,

    left R^T + L (right - R left^T L)^T = M - (I - L L^T) M (I - R R^T),

and sends orth(left) and orth(right) with the next round: two power iterations, each a step a round, as PowerSGD's warm
start has it. What it misses stays on the device. What the server takes for M is at most as long as (left, right): the
columns of its parts (I - L L^T) left R^T and L right^T are at right angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Manifest
from archipel.bundle.carried import LEFT, RIGHT
from archipel.bundle.roles import LowRank, Update
from archipel.errors import ProvenanceError
from archipel.protocol.uploads import upload_program

Tensors = dict[str, np.ndarray]
SHARE = math.sqrt(0.5)
"""Both factors are multiplied with it: together they are then not longer than what they stand for."""
_SLACK = 1e-3


def factored(manifest: Manifest) -> dict[str, Update]:
    """The update entries that carry a matrix as two factors, by the parameter's name."""
    outputs = upload_program(manifest, "training").outputs
    ports = [port for port in outputs if isinstance(port, Update) and isinstance(port.carries, LowRank)]
    return {port.carries.parameters[0]: port for port in ports if port.carries is not None}


def basis_shapes(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """The shapes of the bases that devices get, by name: `[rows, rank]` and `[columns, rank]` of each such matrix."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, port in factored(manifest).items():
        rows, columns = matrix_shape(manifest, name)
        rank = int(port.shape[1])
        shapes |= {LEFT + name: (rows, rank), RIGHT + name: (columns, rank)}
    return shapes


def first_bases(manifest: Manifest) -> Tensors:
    """The bases of the first round: orthonormal, at random, the same for every training of the bundle's shapes."""
    rng = np.random.default_rng(0)
    return {name: _orthonormal(rng.standard_normal(shape)) for name, shape in basis_shapes(manifest).items()}


def split_bases(tensors: Mapping[str, np.ndarray]) -> tuple[Tensors, Tensors]:
    """What belongs to the strategy, and the bases."""
    names = [name for name in tensors if name.startswith((LEFT, RIGHT))]
    return {n: a for n, a in tensors.items() if n not in names}, {n: tensors[n] for n in names}


def next_bases(manifest: Manifest, deltas: Mapping[str, NDArray[np.float64]]) -> Tensors:
    """The bases of the round after one with these sums of factors, by tensor name."""
    found = {}
    for name, port in factored(manifest).items():
        rows, _ = matrix_shape(manifest, name)
        found[LEFT + name] = _orthonormal(deltas[port.tensor][:rows])
        found[RIGHT + name] = _orthonormal(deltas[port.tensor][rows:])
    return found


def expand(factors: NDArray[np.float64], left: np.ndarray, right: np.ndarray) -> NDArray[np.float64]:
    """The matrix `[n, m]` that the sum of factors `[n + m, rank]` stands for, given the bases that devices had."""
    basis, other = left.astype(np.float64), right.astype(np.float64)
    of_left, of_right = np.split(factors / SHARE, [len(basis)])
    return np.asarray(of_left @ other.T + basis @ (of_right.T - (basis.T @ of_left) @ other.T))


def matrix_shape(manifest: Manifest, name: str) -> tuple[int, int]:
    """A parameter's first axis, and the product of the others."""
    (spec,) = [spec for spec in manifest.parameters if spec.name == name]
    return int(spec.shape[0]), math.prod(int(dim) for dim in spec.shape[1:])


def check_bases(manifest: Manifest, bases: Mapping[str, np.ndarray]) -> None:
    """Check on a device what a server sent: of the right names and shapes, and orthonormal.

    With other columns, what devices keep for later rounds would grow: of a matrix along a column that is there r times,
    the server takes r times what devices sent.

    Raises ProvenanceError.
    """
    expected = basis_shapes(manifest)
    if bases.keys() != expected.keys():
        raise ProvenanceError(f"low-rank bases: expected {sorted(expected)}, the server sent {sorted(bases)}")
    for name, array in bases.items():
        if array.shape != expected[name] or array.dtype != np.float32:
            raise ProvenanceError(
                f"low-rank basis {name!r}: expected float32{list(expected[name])}, got {array.dtype}{list(array.shape)}"
            )
        columns = array.astype(np.float64)
        off = np.abs(columns.T @ columns - np.eye(columns.shape[1])).max()
        # Negated, because no comparison with a NaN is true.
        if not off <= _SLACK:
            raise ProvenanceError(
                f"low-rank basis {name!r}: its columns are not orthonormal, their products are off by {off:g}"
            )


def _orthonormal(columns: NDArray[np.float64]) -> np.ndarray:
    # Householder's QR gives orthonormal columns whatever the rank of what it gets is.
    return np.ascontiguousarray(np.linalg.qr(columns)[0], np.float32)
