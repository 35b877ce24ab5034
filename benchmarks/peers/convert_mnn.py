"""ONNX to MNN, by MNN's own converter.

    python convert_mnn.py MODEL.onnx MODEL.mnn

The native module is called, as the command-line tools report their use to MNN's makers and install a package for that.
One conversion a process: a second one crashes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import _tools


def convert(source: Path, target: Path) -> None:
    _tools.mnnconvert(["", "-f", "ONNX", "--modelFile", str(source), "--MNNModel", str(target), "--bizCode", "x"])


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
    # Without the interpreter's own end, at which the native module may crash.
    os._exit(0 if Path(sys.argv[2]).exists() else 1)
