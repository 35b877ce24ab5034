"""Transformations of transformations of generated programs of If, Loop and Scan, against PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from gradient_cases.case import try_examples
from gradient_cases.programs import Program, programs
from test_control_flow import INPUTS, SUM, WRT, close, draw_inputs, parse, run

from archipel import Model
from archipel.autodiff import checkpoint, gradient, hessian_vector, jvp, linearize, vjp, vmap

MOVED = ["x", "w"]


@pytest.mark.parametrize(("depth", "examples"), [(1, 3), pytest.param(2, 20, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=4)
def test_generated_programs(depth: int, examples: int) -> None:
    def check(program: Program) -> None:
        model = parse(INPUTS, f"T loss, T[n, 3] {program.result}", f"{program.text} {SUM.format(program.result)}")
        feed, rng = draw_inputs(len(program.text)), np.random.default_rng(1)
        moved = {name: rng.standard_normal(feed[name].shape) for name in MOVED}
        check_tangents(program, model, feed, moved)
        check_recomputed(program, model, feed, moved, rng)
        check_third_order(program, model, feed, moved)
        if "Less" not in program.text:  # lanes that stop at different times stack different numbers of items
            check_lanes(program, model, feed, moved)

    try_examples(check, programs(depth), examples)


def check_tangents(program: Program, model: Model, feed: dict, moved: dict) -> None:
    point, linear = linearize(model, of=["loss"], wrt=MOVED)
    slopes = derivatives(program, feed)[0]
    residuals = run(point, feed)
    for factor in (1.0, -3.0):
        tangents = {f"{name}.tangent": factor * value for name, value in moved.items()}
        found = run(linear, feed | residuals | tangents)["loss.tangent"]
        expected = factor * sum((slopes[name] * moved[name]).sum() for name in MOVED)
        assert close(found, np.array(expected), 1e-8), "linearize"


def check_recomputed(program: Program, model: Model, feed: dict, moved: dict, rng: np.random.Generator) -> None:
    names = [str(value.name) for node in model.ir.graph for value in node.outputs]
    marked = checkpoint(model, at=[name for name in names if rng.random() < 0.4] or names[:1])
    slopes, curved, _ = derivatives(program, feed, moved)
    tangents = {f"{name}.tangent": value for name, value in moved.items()}
    found = run(gradient(marked, wrt=MOVED), feed) | run(hessian_vector(marked, wrt=MOVED), feed | tangents)
    for name in MOVED:
        assert close(found[f"{name}.grad"], slopes[name], 1e-8), "checkpoint"
        assert close(found[f"{name}.hvp"], curved[name], 1e-7), "checkpoint"


def check_third_order(program: Program, model: Model, feed: dict, moved: dict) -> None:
    third = vjp(hessian_vector(model, wrt=MOVED), of=["x.hvp", "w.hvp"], wrt=MOVED)
    tangents = {f"{name}.tangent": value for name, value in moved.items()}
    cotangents = {f"{name}.hvp.cotangent": value[::-1].copy() for name, value in moved.items()}
    found, expected = run(third, feed | tangents | cotangents), derivatives(program, feed, moved)[2]
    for name in MOVED:
        assert close(found[f"{name}.grad"], expected[name], 1e-6), "third order"


def check_lanes(program: Program, model: Model, feed: dict, moved: dict) -> None:
    pushed = jvp(gradient(model, wrt=["w"]), of=["w.grad"], wrt=["x"])
    xs, along = (np.stack([value, 0.7 * value[::-1]]) for value in (feed["x"], moved["x"]))
    found = run(vmap(pushed, over=["x", "x.tangent"]), feed | {"x": xs, "x.tangent": along})["w.grad.tangent"]
    # Without lanes where it depends on nothing that has them.
    for lane, x, tangent in zip(np.broadcast_to(found, (2, 3, 3)), xs, along):
        expected = derivatives(program, feed | {"x": x}, {"x": tangent})[1]["w"]
        assert close(lane, expected, 1e-7), "vmap of jvp of gradient"


def derivatives(
    program: Program, feed: Mapping[str, np.ndarray], moved: Mapping[str, np.ndarray] | None = None
) -> list[dict[str, np.ndarray]]:
    """Slopes of the loss in x and w, how they change along `moved`, and how that, along `moved` turned upside down,
    depends on x and w."""
    tensors = {name: torch.tensor(value, requires_grad=name in WRT) for name, value in feed.items()}
    values = dict(tensors)
    program.run(values)
    result = (values[program.result] ** 2).sum() + sum(tensors[name].sum() for name in WRT)
    found = []
    for turned in (False, True, None):
        slopes = torch.autograd.grad(
            result, [tensors[name] for name in MOVED], create_graph=True, allow_unused=True, materialize_grads=True
        )
        by_name = dict(zip(MOVED, slopes))
        found.append({name: slope.detach().numpy() for name, slope in by_name.items()})
        if turned is None or moved is None:
            break
        along = {name: torch.tensor(value[::-1].copy() if turned else value) for name, value in moved.items()}
        # Zeros, so that there is a graph to differentiate also where no slope depends on anything.
        nothing = sum(0.0 * tensors[name].sum() for name in MOVED)
        result = sum(((by_name[name] * each).sum() for name, each in along.items()), nothing)
    return found
