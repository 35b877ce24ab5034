"""The part of docs/operators.md on engines that train, from what `benchmarks/engines.py --json` printed."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

ROWS = Path(__file__).with_name("engines.jsonl")
TOLERANCE = 1e-4
BATCH = 16
HEAD = """
## Engines

A training step is a graph of standard operators, so an inference engine trains with it (`benchmarks/engines.py`):
every network of `archipel.models` learns for {steps} steps by SGD with momentum, on the same data and from the same
weights, in a process and an environment of the engine's own. A cell has the largest difference of a loss
from ONNX Runtime's (relative; absolute for losses below 1), and in parentheses the time of a step over ONNX Runtime's,
the fastest of up to 40 in turns on two threads (ONNX Runtime Web: one). Minibatches are of 16 examples unless the cell
says otherwise. **Losses are equal to 1e-4 in {equal} of {cells} cells that were run**; what stands in the way of
the others is named below.

The rows are those of `python benchmarks/engines.py --json > tests/operators/engines.jsonl 2>&1`.
{run}

**Times are rough**: the two cores had work for fifteen, and a step that is longer than a slice of time looks up to ten
times as long beside one that is shorter. With less other work, at 32 examples, OpenVINO took 0.75 and 0.83 (two runs)
of ONNX Runtime's time on the FedAvg CNN, 0.88 and 0.89 on DS-CNN, 0.5 and 0.67 on the 1D-CNN, 0.8 on LeNet and the
Transformer, 1.4 on ResNet-8 (twice), 1.3 on U-Net, 1.9 on MobileNetV2, 6 and 8 on the autoencoder, and 0.9 to 4.8 on
the MLP. So it depends on the network and the machine: on a device `delegates="fastest"` measures
([device.md](device.md#delegates)).

| network | {engines} |
|---|{lines}|
"""
TAIL = """
- *plain*: the form that `Model.plain_scans` gives. OpenVINO's Scan knows no values of the graph around it, and that of
  onnx.reference runs forwards only. IREE always gets plain Scans, and the batch as a number (`Model.fix`).
- OpenVINO computes integers in int32. So as a delegate it refuses what draws random numbers in uint32 (dropout,
  differential privacy), and float64, rather than learn something else. Two orders of work on float32 differ in the last
  digit; batch statistics of deep networks make more of it from step to step, so those of MobileNetV2 are frozen here.
- Tried and not in the table: Apache TVM 0.27 (no Scan, no shape arithmetic beside Mul), tinygrad 0.14 (its CPU device
  needs clang, which its wheel does not bring), onnx2torch 1.5 (no BitwiseAnd, and initializers that are inputs fail).
"""


def engines_part() -> str:
    """The headline, the table and what stands in the way of some engine."""
    first, *lines = ROWS.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    networks = list(dict.fromkeys(row["case"] for row in rows))
    cells = {(row["case"], row["engine"]): row for row in rows}
    reasons: list[str] = []
    table = "".join(
        f"| {name} | {' | '.join(_cell(cells.get((name, engine)), reasons) for engine in engines)} |\n"
        for name in networks
    )
    equal = sum(row["error"] is not None and row["error"] <= TOLERANCE for row in rows)
    head = HEAD.format(
        steps=20, run=fill(first[:1].upper() + first[1:] + ".", 120), equal=equal, cells=len(rows),
        engines=" | ".join(engines), lines="|".join("---" for _ in engines),
    )  # fmt: skip
    notes = "".join(
        fill(f"{number}. {reason}", 120, subsequent_indent="   ") + "\n" for number, reason in enumerate(reasons, 1)
    )
    return f"{head}{table}\n{notes}{TAIL}"


def _cell(row: dict[str, Any] | None, reasons: list[str]) -> str:
    if row is None:
        return "not run"
    if row["error"] is None:
        if row["reason"] not in reasons:
            reasons.append(row["reason"])
        return f"[{reasons.index(row['reason']) + 1}]"
    equal = f"{row['error']:.0e}" if row["error"] <= TOLERANCE else f"**{row['error']:.0e}**"
    more = ", plain" * row["plain"] + f", {row['batch']} examples" * (row["batch"] != BATCH)
    return f"{equal} ({_times(row['ratio'])}{more})"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
