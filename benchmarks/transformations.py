"""Transformations of graphs against other ways to the same result: the files in transformations/, one a measurement.

python benchmarks/transformations.py                  everything
python benchmarks/transformations.py --quick          fewer cases and repetitions
python benchmarks/transformations.py --only loop      one of them
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from measure import Report, arguments

LIBRARIES = ("numpy", "onnxruntime", "torch")
# name: (module in transformations/, its function of `quick` that yields rows)
MEASUREMENTS = {
    "forward": ("forward", "forward_mode"),
    "checkpoint": ("checkpoint", "checkpointed_steps"),
    "loop": ("loop", "loop_gradient"),
    "vmap": ("vmap", "clients_and_examples"),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=MEASUREMENTS, help="one measurement")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent / "transformations"))
    report = Report(options.json, LIBRARIES)
    for name, (module, function) in MEASUREMENTS.items():
        if options.only in (None, name):
            for row in getattr(importlib.import_module(module), function)(options.quick):
                report.add([row])


if __name__ == "__main__":
    main()
