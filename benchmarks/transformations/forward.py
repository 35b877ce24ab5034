"""Forward mode: Jacobian-vector products, Hessian-vector products and linearized models, against torch.func.

Of the outputs, along tangents of the input or of all weights, and the Hessian of the mean square of the outputs times a
tangent of all weights (`hessian_vector` against torch.func's jvp of the gradient). The outputs themselves are computed
as well, by both. "forward pass" is ONNX Runtime's of the network alone; "one more tangent" compares the linear model of
`linearize` with the whole jvp. Batch 32, one thread, interleaved, the processor's own time: it means the same on a
machine that others use as well.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from measure import Row, compare, interleave

BATCH, THREADS = 32, 1
INPUTS = {"mlp": (784,), "fedavg_cnn": (1, 28, 28), "resnet8": (3, 32, 32)}


def forward_mode(quick: bool) -> Iterator[Row]:
    """Rows of each network."""
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    for name in list(INPUTS)[: 2 if quick else None]:
        yield from of_network(name, 0.5 if quick else 5.0)


def of_network(name: str, seconds: float) -> Iterator[Row]:
    import torch

    from archipel import Model, autodiff, models

    torch.set_num_threads(THREADS)
    module = getattr(models, name)(seed=0).eval()
    rng = np.random.default_rng(0)
    example = torch.from_numpy(rng.standard_normal((BATCH, *INPUTS[name])).astype(np.float32))
    model = with_loss(Model.from_torch(module, example))
    x, y = model.inputs[0].name, model.outputs[0].name
    weights = {key: value.detach() for key, value in module.named_parameters()}
    names = [name for name in model.parameter_names if name in weights]  # without BatchNormalization's statistics
    draw = {x: example.numpy()} | {f"{n}.tangent": drawn(rng, weights[n].shape) for n in names}
    draw[f"{x}.tangent"] = drawn(rng, example.shape)
    moving = {n: torch.from_numpy(draw[f"{n}.tangent"]) for n in names}
    direction = torch.from_numpy(draw[f"{x}.tangent"])
    rest = {n: v for n, v in weights.items() if n not in moving}

    def at(point: Any, values: Any) -> Any:
        return torch.func.functional_call(module, {**rest, **values}, (point,))

    def loss(values: Any) -> Any:
        return (at(example, values) ** 2).mean()

    chosen = {n: weights[n] for n in names}
    tries: dict[str, tuple[Any, list[str], Callable[[], Any]]] = {
        "jvp, input": (
            autodiff.jvp(model, of=[y], wrt=[x]),
            [y, f"{y}.tangent"],
            lambda: torch.func.jvp(lambda point: at(point, chosen), (example,), (direction,)),
        ),
        "jvp, weights": (
            autodiff.jvp(model, of=[y], wrt=names),
            [y, f"{y}.tangent"],
            lambda: torch.func.jvp(lambda values: at(example, values), (chosen,), (moving,)),
        ),
        "hessian_vector, weights": (
            autodiff.hessian_vector(model, of="loss", wrt=names),
            [f"{n}.hvp" for n in names],
            lambda: list(torch.func.jvp(torch.func.grad(loss), (chosen,), (moving,))[1].values()),
        ),
    }
    plain = opened(model)
    for case, (made, outputs, theirs) in tries.items():
        session = opened(made)
        feed = {port.name: draw[port.name] for port in made.inputs}

        def ours(session: Any = session, outputs: list[str] = outputs, feed: Any = feed) -> Any:
            return session.run(outputs, feed)

        for found, expected in zip(ours(), theirs()):
            scale = float(expected.abs().max())
            assert np.allclose(found, expected.detach().numpy(), rtol=1e-3, atol=1e-3 * scale), (name, case)
        runs = {"archipel": ours, "torch.func": theirs, "forward pass": lambda: plain.run([y], {x: draw[x]})}
        times = interleave(runs, seconds, clock=time.process_time)
        yield from compare("forward mode", f"{name}: {case}", "archipel", times)
    yield from linearized(model, name, x, y, draw, seconds)


def linearized(model: Any, name: str, x: str, y: str, draw: dict[str, np.ndarray], seconds: float) -> Iterator[Row]:
    from archipel import autodiff

    at_point, linear = autodiff.linearize(model, of=[y], wrt=[x])
    found = dict(zip([port.name for port in at_point.outputs], opened(at_point).run(None, {x: draw[x]})))
    pushed = opened(autodiff.jvp(model, of=[y], wrt=[x]))
    feed = {port.name: draw.get(port.name, found.get(port.name)) for port in linear.inputs}
    whole = {x: draw[x], f"{x}.tangent": draw[f"{x}.tangent"]}
    session = opened(linear)
    runs = {
        "linearized": lambda: session.run(None, feed),
        "jvp": lambda: pushed.run([f"{y}.tangent"], whole),
    }
    times = interleave(runs, seconds, clock=time.process_time)
    yield from compare("forward mode", f"{name}: one more tangent", "linearized", times)


def with_loss(model: Any) -> Any:
    """The model with the mean square of its first output as `loss`."""
    from archipel.graph import Builder

    op = Builder(model.ir.graph)
    y = model.ir.graph.outputs[0]
    op.name_output(op.ReduceMean(op.Mul(y, y), keepdims=0), "loss")
    return model


def drawn(rng: np.random.Generator, shape: Any) -> np.ndarray:
    return rng.standard_normal(tuple(shape)).astype(np.float32)


def opened(model: Any) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return onnxruntime.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
