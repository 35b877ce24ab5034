"""Heat and Burgers' equation, solved by training a network on ONNX Runtime: `python examples/physics/run.py`.

    python examples/physics/run.py                                   both, 8000 steps each
    python examples/physics/run.py --quick                           a few hundred steps, a few seconds
    python examples/physics/run.py --peer PYTHON                     also DeepXDE, in that interpreter's environment

Writes results.json, and heat.png and burgers.png where matplotlib is, into the folder `physics` or --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import numpy as np
import onnxruntime
from network import equation, network, weights
from problems import PROBLEMS, Points, Problem, draw_points, grid

from archipel import Model
from archipel.training import losses, optimizers, step_graph
from archipel.training.driver import StepRunner

INTERIOR, SIDES, START = 1000, 80, 160


def train(
    problem: Problem, points: Points, first: dict[str, np.ndarray], steps: int
) -> tuple[Model, list[float], float]:
    """The trained network, the loss before each step, and the processor's seconds of all steps."""
    size = len(points.interior) + len(points.edge)
    model, x, labels = equation(network(first, size), problem, points)
    runner = StepRunner(step_graph(model, losses.mse(), optimizers.adam(lr=1e-3)))
    begin = time.process_time()
    history = [runner.step((x, labels))["loss"] for _ in range(steps)]
    seconds = time.process_time() - begin
    return network({name: runner.tensors[name] for name in first}), history, seconds


def predict(model: Model, points: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["u"], {"x": points})
    return np.asarray(found)


def error(found: np.ndarray, exact: np.ndarray) -> float:
    """The relative L2 error on the grid, at t > 0."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def solve(name: str, steps: int, seed: int, out: Path, peer: str | None) -> dict[str, float]:
    problem = PROBLEMS[name]
    points, first = draw_points(problem, INTERIOR, SIDES, START, seed), weights(seed=seed)
    model, history, seconds = train(problem, points, first, steps)
    places, exact = grid(problem)
    found = predict(model, places)
    result = {
        "steps": steps, "first loss": history[0], "last loss": history[-1], "error": error(found, exact),
        "processor milliseconds a step": 1000 * seconds / steps,
    }  # fmt: skip
    model.save(out / f"{name}.onnx")
    solutions = {"archipel": found}
    if peer is not None:
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
    draw(out / f"{name}.png", problem, exact, solutions)
    return result


def draw(path: Path, problem: Problem, exact: np.ndarray, solutions: dict[str, np.ndarray]) -> None:
    """u over x at four times, the exact solution as a line and the networks' as marks."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    size = round(len(exact) ** 0.5)
    x, times = np.linspace(problem.low, problem.high, size), np.linspace(0.01, 1, size)
    figure, axes = plt.subplots(1, 4, figsize=(13, 3), sharey=True, layout="constrained")
    for axis, row in zip(axes, (0, size // 4, size // 2, size - 1)):
        axis.plot(x, exact.reshape(size, size)[row], "k-", label="exact")
        for (title, found), mark in zip(solutions.items(), "ox"):
            axis.plot(x[::4], found.reshape(size, size)[row][::4], mark, markersize=4, fillstyle="none", label=title)
        axis.set(title=f"t = {times[row]:.2f}", xlabel="x")
    axes[0].set_ylabel("u")
    axes[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("physics"))
    parser.add_argument("--problem", choices=PROBLEMS, action="append")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="300 steps")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with DeepXDE and PyTorch")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in options.problem or PROBLEMS:
        results[name] = solve(name, 300 if options.quick else options.steps, options.seed, options.out, options.peer)
        print(name, json.dumps(results[name]), flush=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
