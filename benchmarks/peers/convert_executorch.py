"""Writes what ExecuTorch trains: the joint graph of a network's loss and gradients, which PyTorch has exported.

    python convert_executorch.py EXPORTED.pt2 TARGET.pte

The portable operators run it: delegates such as XNNPACK have no gradients' operators and take no weights that change.
"""

from __future__ import annotations

import sys

import torch
from executorch.exir import to_edge


def main() -> None:
    edge = to_edge(torch.export.load(sys.argv[1]))
    with open(sys.argv[2], "wb") as file:
        edge.to_executorch().write_to_file(file)


if __name__ == "__main__":
    main()
