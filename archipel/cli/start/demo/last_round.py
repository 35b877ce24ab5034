"""Computes one round of a federation again, in one place and without any server, to compare the model bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from archipel.bundle import Bundle
from archipel.cli.input_output.arrays import read_arrays
from archipel.client.memory.journal import read_entries
from archipel.client.memory.keystore import FileKeys, data_key
from archipel.client.memory.seeds import RoundSeeds
from archipel.errors import CommandError
from archipel.lite_runtime import Runtime
from archipel.protocol.vector import Layout

_MODULUS_BITS = 32


def average(
    bundle: Bundle,
    before: Mapping[str, np.ndarray],
    devices: Sequence[Path],
    round_id: str,
    hyperparameters: Mapping[str, float],
) -> dict[str, np.ndarray]:
    """Federated averaging in fixed point (McMahan et al. 2017, algorithm 1) of what these devices trained.

    Arguments:
        bundle: the task's.
        before: the parameters that the round began with, by name.
        devices: the devices whose updates are in the sum, as their folders with `agent` and data.npz.
        round_id: the root's round. Each device trains once more with its own draws of that round.
        hyperparameters: those of the task.

    Returns the parameters by name, float32. Raises CommandError for a device that was not in the round.
    """
    layout = Layout.of(bundle.program("finish"))
    runtime = Runtime(bundle)
    total = np.zeros(layout.length, np.uint32)
    for folder in devices:
        agent = folder / "agent"
        plans = [entry.plan for entry in read_entries(agent / "rounds") if round_id in (entry.round_id, entry.origin)]
        fields = read_arrays(folder / "data.npz")
        if not plans or isinstance(fields, np.ndarray):
            raise CommandError(f"{folder}: the device was not in round {round_id}")
        update = runtime.local_round(
            fields,
            seed=RoundSeeds(data_key(FileKeys(agent))).derive(plans[-1]),
            parameters=before,
            hyperparameters=hyperparameters,
        )
        # 2^32 wraps around as the modulus of a round does.
        total += layout.encode(update.arrays, modulus_bits=_MODULUS_BITS, max_cohort=len(devices))
    summed = layout.decode_sum(total, cohort=len(devices), modulus_bits=_MODULUS_BITS)
    weight = summed.total_weight(len(devices))
    return {
        name: (values.astype(np.float64) + summed.deltas[name] / weight).astype(np.float32)
        if name in summed.deltas
        else np.asarray(values)
        for name, values in before.items()
    }
