"""Federated low-rank adapters (Hu et al. 2022, "LoRA"; averaged as in Zhang et al. 2024, "FedIT").

Device half: weights W of Gemm, MatMul, Conv and embeddings (Gather) become W + alpha / rank * B A with W fixed, however
W reaches its layer; devices train, send and receive only the small A and B. `predict` keeps the plain layers, into
whose weights `refresh` merges B A. Server half: federated averaging of A and of B, each on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from archipel.strategies import averaging
from archipel.strategies.device import Adapters, DeviceHalf, Upload, check_patterns, check_positive, check_whole
from archipel.strategies.finish import weighted_deltas


def device(
    upload: Upload,
    *,
    targets: str | Sequence[str] = "*",
    rank: int = 4,
    alpha: float | None = None,
    full: str | Sequence[str] = (),
    seed: int = 0,
) -> DeviceHalf:
    """`targets` are globs of weights that get adapters; `full` of tensors trained without, such as the output layer.

    `alpha` None: equal to `rank`, so that B A has the factor 1. `seed` is that of A's first values; B begins at 0.
    """
    name = upload.strategy
    rank = check_whole(name, "rank", rank, 1)
    return DeviceHalf(
        finish=weighted_deltas(upload),
        adapters=Adapters(
            targets=check_patterns(name, "targets", targets),
            rank=rank,
            alpha=float(rank) if alpha is None else check_positive(name, "alpha", alpha),
            full=check_patterns(name, "full", full),
            seed=check_whole(name, "seed", seed, 0),
        ),
    )


STRATEGY = averaging.strategy("lora", device)
