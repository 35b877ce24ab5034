"""ONNX to MNN, then MNN to int8 with the calibration examples: MNN's own converter and quantizer.

    python convert_mnn.py MODEL.onnx MODEL.mnn
    python convert_mnn.py MODEL.mnn INT8.mnn CALIBRATION.npy

The native module is called, as the command-line tools report their use to MNN's makers and install a package for that.
One conversion a process: a second one crashes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import _tools
import MNN
import numpy as np


def convert(source: Path, target: Path) -> None:
    _tools.mnnconvert(["", "-f", "ONNX", "--modelFile", str(source), "--MNNModel", str(target), "--bizCode", "x"])


def quantize(source: Path, target: Path, calibration: Path) -> None:
    """Every example is a folder with input.txt, and input.json that describes it."""
    interpreter = MNN.Interpreter(str(source))
    output = next(iter(interpreter.getSessionOutputAll(interpreter.createSession())))
    folder = source.parent / "mnn-calibration"
    examples = np.load(calibration)
    for index, x in enumerate(examples):
        place = folder / str(index)
        place.mkdir(parents=True, exist_ok=True)
        np.savetxt(place / "input.txt", x.ravel(), fmt="%.8g")
        described = {"inputs": [{"name": "input", "shape": [1, *x.shape]}], "outputs": [output]}
        (place / "input.json").write_text(json.dumps(described))
    settings = {
        "format": "RGB",
        "path": f"{folder}{os.sep}",
        "used_sample_num": len(examples),
        "feature_quantize_method": "KL",
        "weight_quantize_method": "MAX_ABS",
        "input_type": "sequence",
        "batch_size": 1,
    }
    path = target.with_suffix(".json")
    path.write_text(json.dumps(settings))
    _tools.mnnquant(["", str(source), str(target), str(path)])


if __name__ == "__main__":
    if len(sys.argv) == 3:
        convert(*map(Path, sys.argv[1:]))
    else:
        quantize(*map(Path, sys.argv[1:]))
    # Without the interpreter's own end, at which the native module may crash.
    os._exit(0 if Path(sys.argv[2]).exists() else 1)
