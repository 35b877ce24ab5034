"""One training by several processes: PyTorch places the module over them (DDP, FSDP2, DTensor, pipelining)."""

from __future__ import annotations

from archipel.training.cloud.parallel.group import Processes, processes, under_torchrun
from archipel.training.cloud.parallel.placed import Placed
from archipel.training.cloud.parallel.placing import WAYS, prepare

__all__ = ["WAYS", "Placed", "Processes", "prepare", "processes", "under_torchrun"]
