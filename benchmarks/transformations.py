"""Transformations of graphs against what else does the same, interleaved in one run. 2 threads.

    python benchmarks/transformations.py                  everything
    python benchmarks/transformations.py --quick          fewer cases and repetitions
    python benchmarks/transformations.py --only vmap

Each module of benchmarks/transformations/ has `rows(quick)`, which yields rows as they are measured.
"""

from __future__ import annotations

import importlib

from measure import Report, arguments

MODULES = ("vmap",)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=MODULES, help="one transformation")
    options = parser.parse_args()
    report = Report(options.json, ("numpy", "onnxruntime", "torch"))
    for name in [options.only] if options.only else MODULES:
        module = importlib.import_module(f"transformations.{name}")
        for rows in module.rows(options.quick):
            report.add(rows)


if __name__ == "__main__":
    main()
