"""One step of a federated training: from a cohort's sum to the next parameters and the strategy's next state.

The server and the simulator call the same function, so that a simulated round and a real one of the same sum end at the
same model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.bundle import Manifest
from archipel.errors import BoundError, ProtocolError
from archipel.protocol.vector import DecodedSum
from archipel.strategies.running_statistics import combine_statistics, shared_statistics, split_statistics
from archipel.strategies.step_limits import History, Step, keep_within
from archipel.strategies.strategy import Began, Strategy, Tensors
from archipel.strategies.update_compression import next_bases, split_bases, unpack_deltas


def move_model(
    strategy: Strategy,
    manifest: Manifest,
    parameters: Mapping[str, np.ndarray],
    state: Tensors,
    total: DecodedSum,
    cohort: int,
    hyperparameters: Mapping[str, float],
    history: History,
    plan: Mapping[str, float] | None = None,
    began: Began | None = None,
) -> tuple[Tensors, Tensors, Step]:
    """Apply the sum of `cohort` updates.

    Arguments:
        strategy: the algorithm that the bundle was made for.
        manifest: the bundle's.
        parameters: all shared parameters by name, running statistics among them.
        state: what the strategy's server half keeps; {} where it keeps nothing.
        total: the decoded and checked sum, without the entries of metrics.
        cohort: how many devices' updates are in the sum, 1 or more.
        hyperparameters: of the task; the server half reads its own.
        history: the norms of the task's earlier steps.
        plan: the hyperparameters of the round's plan, which the devices got.
        began: what the device of a single update began with, for a strategy that mixes such updates.

    Returns the next parameters and state, with the names, dtypes and shapes of the present ones, and the norms of what
    the step changes.

    Raises BoundError: a new value is not finite, or the step is longer than the strategy's bound. ProtocolError: the
    strategy mixes single updates, and this is none.
    """
    bound = strategy.step_bound(manifest, hyperparameters, cohort)
    pairs = shared_statistics(manifest)
    trained, statistics = split_statistics(parameters, pairs)
    # Bases are no sums, so no step limits them.
    state, bases = split_bases(state)
    following_bases = next_bases(manifest, total.deltas) if bases else {}
    total = unpack_deltas(manifest, total, plan or {}, bases)
    if strategy.mix is not None:
        if began is None or cohort != 1:
            raise ProtocolError(f"strategy {strategy.name!r} mixes in each update by itself, not a sum of {cohort}")
        total = strategy.mix(trained, total, began, manifest, hyperparameters)
    after = strategy.apply(trained, state, total, cohort, hyperparameters)
    _check_finite(after[0])
    moved, following, step = keep_within((trained, state), after, bound, history)
    # With the step's scale: its statistics come from the same sum, and the sum is what may be attacked.
    moved |= combine_statistics(statistics, total, cohort, pairs, step.scale)
    _check_finite(moved)
    return moved, {**following, **following_bases}, step


def _check_finite(parameters: Mapping[str, np.ndarray]) -> None:
    for name, array in parameters.items():
        if not np.isfinite(array).all():
            raise BoundError(f"the new value of parameter {name!r} is not finite; lower the learning rates")
