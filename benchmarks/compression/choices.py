"""How `recipes/int8_ptq.toml` was chosen: ways to calibrate and round, by what they cost on the validation part.

For each float model (its first seed) and way: Kullback-Leibler divergence of the int8 model's answers from the float
model's, in thousandths of a nat, and points of accuracy gained. Test examples are not looked at.

    python benchmarks/compression/choices.py --data ../shared/data --folder .cache/compression
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Literal

import numpy as np
from cases import CASES
from evaluation import logits
from floats import trained
from scipy.special import log_softmax
from subjects import Subject

from archipel.compression import StaticInt8, compress
from archipel.compression.quantize.ranges import Method

CALIBRATIONS: tuple[Method, ...] = ("minmax", "percentile", "mse")
ROUNDINGS: tuple[Literal["nearest", "adaround"], ...] = ("nearest", "adaround")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the study, with its float models")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="MODEL")
    options = parser.parse_args()
    for name in options.only:
        trained(name, 0, options.folder, options.data)
        choose(Subject(name, 0, options.folder, options.data))
    return 0


def choose(subject: Subject) -> None:
    """Print a line for each way."""
    validation = subject.splits.validation
    before = log_softmax(logits(subject.deployed, validation.inputs), axis=1)
    right_before = before.argmax(1) == validation.labels
    path = subject.made / "choice.onnx"
    for calibration, rounding in itertools.product(CALIBRATIONS, ROUNDINGS):
        part = StaticInt8(calibration=calibration, rounding=rounding)
        small, _ = compress(subject.model, [part], calibration=subject.calibration, seed=subject.seed)
        small.save(path)
        after = log_softmax(logits(path, validation.inputs), axis=1)
        divergence = (np.exp(before) * (before - after)).sum(1).mean()
        gained = ((after.argmax(1) == validation.labels).astype(float) - right_before).mean()
        print(f"{subject.title:24}{calibration:12}{rounding:10}{1e3 * divergence:8.3f}{100 * gained:+7.2f}", flush=True)
    path.unlink()


if __name__ == "__main__":
    sys.exit(main())
