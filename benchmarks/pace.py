"""How a million devices come back after an outage, with pace steering and without.

All of them come in one minute. The server tells each when to come again; simulated second by second with the product's
own function, against fixed times of the same mean and times drawn evenly around it.

    python benchmarks/pace.py --plot arrivals.svg
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from measure import Report, Row, arguments

from archipel.server.devices.pace import retry_seconds

SHORTEST, PER_SECOND, OUTAGE = 1.0, 500.0, 60.0
OURS = "archipel"
Draw = Callable[[np.ndarray], np.ndarray]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--plot", type=Path, help="SVG of the arrival curves to write")
    options = parser.parse_args()
    devices = 50_000 if options.quick else 1_000_000
    mean = devices / PER_SECOND
    ways: dict[str, Draw] = {
        "fixed times": lambda draws: np.full(len(draws), mean),
        "even times": lambda draws: mean * (0.5 + draws),
        OURS: lambda draws: np.array(
            [retry_seconds(devices, shortest=SHORTEST, per_second=PER_SECOND, draw=draw) for draw in draws]
        ),
    }
    curves = {name: arrivals(devices, way, seconds=int(4 * mean)) for name, way in ways.items()}
    peaks = {name: float(curve[int(OUTAGE) :].max()) for name, curve in curves.items()}
    report = Report(options.json, ("numpy",))
    report.add(
        Row("pace", f"peak after the outage, {devices:,}", peaks[OURS], peak, name, peaks[OURS] / peak, "1/s")
        for name, peak in [*peaks.items(), ("rate asked for", PER_SECOND)]
        if name != OURS
    )
    if options.plot:
        draw(curves, options.plot)


def arrivals(devices: int, retry: Draw, seconds: int) -> np.ndarray:
    """Devices that come in each second, int [seconds]."""
    rng = np.random.default_rng(0)
    found = np.zeros(seconds, np.int64)
    due = rng.uniform(0, OUTAGE, devices)
    while len(due):
        found += np.bincount(due.astype(np.int64), minlength=seconds)
        due += retry(rng.random(len(due)))
        due = due[due < seconds]
    return found


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """Arrivals per second over time, a panel for each way."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    panels = figure.subplots(len(curves), 1, sharex=True, sharey=True)
    for panel, (name, curve) in zip(panels, curves.items()):
        panel.plot(np.arange(len(curve)) / 60, np.maximum(curve, 0.5), linewidth=0.6)
        panel.axhline(PER_SECOND, color="grey", linestyle="--", linewidth=0.8)
        panel.set(yscale="log", ylabel="per second", title=name)
    panels[-1].set_xlabel("minutes since the server came back; dashed: the rate asked for")
    figure.savefig(path)


if __name__ == "__main__":
    main()
