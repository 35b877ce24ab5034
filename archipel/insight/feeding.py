"""Arrays for the inputs of a graph: what the model stores, the user's examples, or numbers that stand for them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import Count, Hyperparameter, Label, Parameter, Personal, Port, Seed, Start, State, Step
from archipel.errors import InsightError
from archipel.graph import Model
from archipel.graph.shapes import dims

MAX_INPUT_BYTES = 2 << 30
"""Bytes of all inputs together."""


def make_feed(
    model: Model,
    tensors: Mapping[str, np.ndarray],
    batch: int,
    examples: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """An array for each input, and in sentences what was assumed.

    Arguments:
        model: the graph.
        tensors: what inputs of a program start from, by tensor name.
        batch: what every symbolic dimension counts as, where there are no examples.
        examples: arrays by input name.

    Raises InsightError for inputs that are too large, or of a type that has no numbers; GraphError for an input
    without a shape.
    """
    ports = {port.name: port for port in model.signature.inputs} if model.signature else {}
    generator = np.random.default_rng(0)
    feed: dict[str, np.ndarray] = {}
    drawn, total = [], 0
    for value in model.ir.graph.inputs:
        name = value.name or ""
        if examples is not None and name in examples:
            feed[name] = np.ascontiguousarray(examples[name], _dtype(value))
        else:
            shape = tuple(dim if isinstance(dim, int) else batch for dim in dims(value))
            total += math.prod(shape) * _dtype(value).itemsize
            if total > MAX_INPUT_BYTES:
                raise InsightError(f"inputs of {total:,} bytes at a batch of {batch}; give a smaller --batch")
            known = _known(ports.get(name), tensors, shape, batch)
            if known is None:
                drawn.append(f"{name} {_dtype(value).name}[{', '.join(map(str, shape))}]")
                known = _draw(generator, shape, _dtype(value))
            feed[name] = np.broadcast_to(np.asarray(known, _dtype(value)), shape).copy()
    told = []
    if drawn:
        told.append(f"inputs are random numbers (integers and truth values 0 and 1): {', '.join(drawn[:8])}")
    if any(not all(isinstance(dim, int) for dim in dims(value)) for value in model.ir.graph.inputs):
        told.append(f"dimensions without a number count as {batch} (--batch)" if examples is None else
                    "dimensions without a number are those of the examples")  # fmt: skip
    return feed, told


def _known(
    port: Port | None, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...], batch: int
) -> np.ndarray | float | None:
    if isinstance(port, Parameter | Start):
        return tensors.get(port.tensor)
    if isinstance(port, Personal):
        return tensors.get(port.init or port.tensor)
    if isinstance(port, State):
        return tensors.get(port.init) if isinstance(port.init, str) else port.init
    if isinstance(port, Hyperparameter):
        return port.default
    if isinstance(port, Count):
        return batch
    return 0 if isinstance(port, Step | Seed | Label) else None


def _draw(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "fV":  # V: bfloat16 and the like
        return generator.standard_normal(shape, np.float32).astype(dtype)
    # 0 and 1 are classes, tokens or pixels of every model.
    return generator.integers(0, 2, shape).astype(dtype)


def _dtype(value: ir.Value) -> np.dtype:
    if value.dtype is None or value.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise InsightError(f"input {str(value.name)[:64]!r} has no numbers; give it with --examples")
    return value.dtype.numpy()
