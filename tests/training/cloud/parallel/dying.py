"""One of several processes, of which the last one dies in its third step, after all have saved twice.

Run by test_dying.py: dying.py FOLDER. Prints the error that the process ends with, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings

import torch
from torch.nn import functional

sys.path.insert(0, __file__.rpartition("/")[0])
from networks import batch, network

from archipel.errors import TrainingError
from archipel.training.cloud import parallel


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of PyTorch about its own functions
    folder = sys.argv[1]
    inputs, labels = batch("mlp")
    try:
        with parallel.processes(timeout_seconds=30) as here:
            placed = parallel.prepare(network("mlp"), "fsdp")
            optimizer = torch.optim.Adam(placed.parameters())
            for step in range(9):
                if step == 2 and here.rank == here.world - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                placed.step((inputs,), labels, functional.cross_entropy)
                optimizer.step()
                placed.save(f"{folder}/{step}", optimizer)
    except TrainingError as error:
        print(json.dumps(str(error)), flush=True)
        os._exit(3)


main()
