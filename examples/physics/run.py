"""Train a network until it satisfies a differential equation, on ONNX Runtime, and compare it with the exact solution.

The loss is the mean square of the equation's residual at random points, plus that of the error at the edge, where the
solution is given. The residual needs the network's derivatives in x and t: `autodiff` writes them into the graph, and
the gradient of the loss behind them.

    python examples/physics/run.py --quick              see that it works: 300 steps, some seconds, a rough solution
    python examples/physics/run.py                      both equations, 8000 steps each, half a minute each
    python examples/physics/run.py --problem heat       only the heat equation
    python examples/physics/run.py --peer PYTHON        also DeepXDE, from the same weights and points

It needs `pip install '.[convert]'`, and matplotlib for the pictures (`pip install matplotlib`). Into the folder OUT it
writes, for each equation, the trained network NAME.onnx (input x: float32 [n, 2] of (x, t); output u: float32 [n, 1])
and the picture NAME.png, and results.json with the figures of all. README.md says what they mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from network import equation, network, weights
from problems import PROBLEMS, Points, Problem, draw_points, grid

from archipel import Model
from archipel.cli.input_output.progress_line import progress_line
from archipel.training import losses, optimizers, step_graph
from archipel.training.driver import StepRunner

INTERIOR, SIDES, START = 1000, 80, 160
Show = Callable[[str], None]


def train(
    problem: Problem, points: Points, first: dict[str, np.ndarray], steps: int, show: Show
) -> tuple[Model, list[float], float]:
    """The trained network, the loss before each step, and the processor's seconds of all steps."""
    size = len(points.interior) + len(points.edge)
    model, x, labels = equation(network(first, size), problem, points)
    runner = StepRunner(step_graph(model, losses.mse(), optimizers.adam(lr=1e-3)))
    history = []
    begin = time.process_time()
    for step in range(1, steps + 1):
        history.append(runner.step((x, labels))["loss"])
        show(f"step {step} of {steps}, loss {history[-1]:.3g}")
    seconds = time.process_time() - begin
    return network({name: runner.tensors[name] for name in first}), history, seconds


def predict(model: Model, points: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["u"], {"x": points})
    return np.asarray(found)


def error(found: np.ndarray, exact: np.ndarray) -> float:
    """The relative L2 error on the grid, at t > 0."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def solve(
    name: str, steps: int, seed: int, out: Path, peer: str | None, show: Show = lambda text: None
) -> dict[str, float]:
    """Train, measure and draw one equation; the figures that results.json has of it."""
    problem = PROBLEMS[name]
    points, first = draw_points(problem, INTERIOR, SIDES, START, seed), weights(seed=seed)
    model, history, seconds = train(problem, points, first, steps, lambda text: show(f"{name}: {text}"))
    places, exact = grid(problem)
    found = predict(model, places)
    result = {
        "steps": steps, "first loss": history[0], "last loss": history[-1], "error": error(found, exact),
        "processor milliseconds a step": 1000 * seconds / steps,
    }  # fmt: skip
    model.save(out / f"{name}.onnx")
    solutions = {"archipel": found}
    if peer is not None:
        show(f"{name}: DeepXDE trains {steps} steps")
        given = {"interior": points.interior, "edge": points.edge, "values": points.values, "grid": places, **first}
        np.savez(out / "given.npz", **given)  # type: ignore[arg-type]
        script = Path(__file__).parent / "peer.py"
        subprocess.run([peer, script, out, name, str(steps)], check=True)
        told = np.load(out / "peer.npz")
        solutions["DeepXDE"] = told["u"]
        result |= {
            "DeepXDE: first loss": float(told["losses"][0]), "DeepXDE: last loss": float(told["losses"][-1]),
            "DeepXDE: error": error(told["u"], exact),
            "DeepXDE: processor milliseconds a step": 1000 * float(told["seconds"]) / steps,
        }  # fmt: skip
    if can_draw():
        draw(out / f"{name}.png", name, exact, solutions)
    return result


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, name: str, exact: np.ndarray, solutions: dict[str, np.ndarray]) -> None:
    """u over x at four times, the exact solution as a line and the networks' as marks."""
    from matplotlib.figure import Figure

    problem = PROBLEMS[name]
    size = round(len(exact) ** 0.5)
    x, times = np.linspace(problem.low, problem.high, size), np.linspace(0.01, 1, size)
    line = np.linspace(problem.low, problem.high, 1001)  # finer than the grid: Burgers' front is steep
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    plots = figure.subplots(1, 4, sharey=True)
    for axis, row in zip(plots, (0, size // 4, size // 2, size - 1)):
        axis.plot(line, problem.exact(line, np.full_like(line, times[row])), "k-", label="exact")
        for (title, found), mark in zip(solutions.items(), "ox"):
            axis.plot(x[::4], found.reshape(size, size)[row][::4], mark, markersize=4, fillstyle="none", label=title)
        axis.set(title=f"time t = {times[row]:.2f}", xlabel="place x")
        axis.grid(alpha=0.3)
    plots[0].set_ylabel("solution u")
    plots[0].legend()
    errors = ", ".join(f"{title} {error(found, exact):.1%}" for title, found in solutions.items())
    figure.suptitle(f"{problem.title}; relative L2 error: {errors}; x, t and u are dimensionless")
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("physics"), help="folder of the results (default %(default)s)")
    parser.add_argument("--problem", choices=PROBLEMS, action="append", help="one equation only; may be repeated")
    parser.add_argument("--steps", type=int, default=8000, help="steps of Adam for each equation (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the points (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="300 steps, whatever --steps says")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has DeepXDE and PyTorch; see README.md")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps: expected at least 1")
    if options.peer is not None:
        try:
            found = subprocess.run([options.peer, "-c", "import deepxde"], capture_output=True, check=False)
        except OSError as problem:
            parser.error(f"--peer: {problem}")
        if found.returncode:
            parser.error(f"--peer: {options.peer} has no DeepXDE; {options.peer} -m pip install torch==2.13.0 deepxde")
    return options


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if not can_draw():
        print("no pictures, since matplotlib is not installed: pip install matplotlib", file=sys.stderr)
    steps, results = 300 if options.quick else options.steps, {}
    for name in options.problem or PROBLEMS:
        with progress_line() as show:
            made = solve(name, steps, options.seed, options.out, options.peer, show)
        results[name] = made
        print(
            f"{name}: {steps} steps, loss {made['first loss']:.3g} -> {made['last loss']:.3g}, "
            f"relative L2 error {made['error']:.3g}, "
            f"{made['processor milliseconds a step']:.2f} ms of processor time a step",
            flush=True,
        )
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"networks, {'pictures ' if can_draw() else ''}and results.json are in {options.out}")


if __name__ == "__main__":
    main()
