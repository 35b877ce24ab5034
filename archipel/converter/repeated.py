"""K steps of a train program in one graph: one call of the runtime instead of K, where a step is short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from archipel.bundle.roles import Count, Metric, Port, Program, State
from archipel.converter.limits import flops_per_example
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.training.nesting import MOVING, PER_MINIBATCH, repeat

_PER_STEP = (*PER_MINIBATCH, Metric)
P = TypeVar("P", bound=Port)

STEPS = 8
"""How many steps are made at once by default; larger numbers save no more time."""
SHORT_STEP = 1_000_000
"""FLOPs of a step up to which saving a call of the runtime, about 6 microseconds, is worth a graph of its own."""


def with_repeated(programs: Mapping[str, Model], batch_size: int, steps: int = STEPS) -> dict[str, Model]:
    """The programs, and for each train program whose steps are short one that makes `steps` of them at once."""
    result = dict(programs)
    for name, model in programs.items():
        if model.kind != "train":
            continue
        if flops_per_example(model) * batch_size <= SHORT_STEP and _reason_against(model.program) is None:
            result[f"{name}_{steps}"] = repeated(model, steps, name)
    return result


def repeated(program: Model, steps: int, repeats: str = "train") -> Model:
    """The program that makes `steps` steps of `program`, a train program called `repeats`; `program` is not changed.

    Its ports are those of the program; those that differ from step to step (fields, noise, metrics) get a first axis
    of `steps`. Raises ConversionError for a program of which several steps in one graph would compute something else:
    one that reads the number of steps made so far, one whose state starts anew with every step, or one that writes a
    tensor that it does not read.
    """
    if program.kind != "train" or program.steps != 1:
        raise ConversionError(f"repeated: expected a train program of one step, got {program!r}")
    signature = program.program
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise ConversionError(f"repeated: steps must be a whole number of 2 or more, is {steps!r}")
    reason = _reason_against(signature)
    if reason is not None:
        raise ConversionError(f"repeated: {reason}; leave the program as it is")
    made = repeat(program.copy(), steps)
    inputs = tuple(_stacked(port, steps) for port in signature.inputs)
    outputs = tuple(_stacked(port, steps) for port in signature.outputs)
    # The signature has the program's ports, stacked. The ports of the new graph must be the same.
    for wanted, port in zip((*inputs, *outputs), (*made.program.inputs, *made.program.outputs)):
        if wanted.name != port.name or not _same_shape(wanted.shape, port.shape):
            raise ConversionError(f"repeated: {wanted.name!r} should be {list(wanted.shape)}, the graph has {port!r}")
    made.signature = Program(kind="train", inputs=inputs, outputs=outputs, steps=steps, repeats=repeats)
    return made


def _reason_against(signature: Program) -> str | None:
    """Why several steps in one graph would not be the same; None if they are."""
    read = {(type(port), getattr(port, "tensor", "")) for port in signature.inputs}
    for port in (*signature.inputs, *signature.outputs):
        if isinstance(port, Count) and port.of == "steps":
            return f"input {port.name!r} counts the steps, a number that stays the same inside one graph"
        if isinstance(port, State) and port.lifetime == "step":
            return f"state {port.tensor!r} starts anew with every step, but one graph would keep it from step to step"
    for port in signature.outputs:  # a loop carries only values that it starts with
        if isinstance(port, MOVING) and (type(port), port.tensor) not in read:
            return f"output {port.name!r} writes {port.tensor!r}, which the program does not read"
    return None


def _stacked(port: P, steps: int) -> P:
    return msgspec.structs.replace(port, shape=(steps, *port.shape)) if isinstance(port, _PER_STEP) else port


def _same_shape(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    # A size that one shape has as a symbol may be a number in the other.
    return len(one) == len(other) and all(
        a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(one, other)
    )
