"""Random small programs of nested If, Loop and Scan that capture values, as onnx models and as functions of tensors.

One program is drawn once and told twice: as text for onnx.parser, and to PyTorch, which runs it as plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
Run = Callable[[dict[str, torch.Tensor]], None]

SHAPE = "T[n, 3]"
MATRIX = "w"
POINTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "Tanh": torch.tanh,
    "Sin": torch.sin,
    "Neg": torch.neg,
    "Sigmoid": torch.sigmoid,
    "Mul": torch.mul,
    "Add": torch.add,
    "Sub": torch.sub,
}
PAIRS = {"Mul", "Add", "Sub"}


@dataclass
class Program:
    """`text`: nodes of a graph with inputs x, y [n, 3], w [3, 3], s [4, n, 3] (all T), k (int64) that compute
    `result`; `run` adds the same to a dictionary of tensors by name."""

    text: str
    result: str
    run: Run


def programs(depth: int = 2) -> st.SearchStrategy[Program]:
    """Programs whose bodies are nested up to `depth` deep."""

    @st.composite
    def strategy(draw: Draw) -> Program:
        writer = _Writer(draw)
        names = ["x", "y"]
        parts = [writer.block(names, depth) for _ in range(draw(st.integers(1, 2)))]
        text = "\n".join(text for text, _ in parts)
        steps = [run for _, run in parts]

        def run(values: dict[str, torch.Tensor]) -> None:
            for step in steps:
                step(values)

        return Program(text, names[-1], run)

    return strategy()


class _Writer:
    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._count = 0

    def name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def block(self, names: list[str], depth: int) -> tuple[str, Run]:
        """A control-flow node with some operators before it; appends what it computes to `names`."""
        texts, runs = [], []
        for _ in range(self._draw(st.integers(0, 2))):
            text, run = self.operator(names)
            texts.append(text)
            runs.append(run)
        if depth:
            kind = self._draw(st.sampled_from([self.branch, self.loop, self.scan]))
            text, run = kind(names, depth - 1)
            texts.append(text)
            runs.append(run)
        text, run = self.operator(names)

        def every(values: dict[str, torch.Tensor]) -> None:
            for step in [*runs, run]:
                step(values)

        return "\n".join([*texts, text]), every

    def operator(self, names: list[str]) -> tuple[str, Run]:
        op_type, out = self._draw(st.sampled_from([*POINTWISE, "MatMul"])), self.name("v")
        a, b = (self._draw(st.sampled_from(names)) for _ in range(2))
        names.append(out)
        if op_type == "MatMul":

            def run(values: dict[str, torch.Tensor]) -> None:
                values[out] = values[a] @ values[MATRIX]

            return f"{out} = MatMul ({a}, {MATRIX})", run
        function, pair = POINTWISE[op_type], op_type in PAIRS

        def pointwise(values: dict[str, torch.Tensor]) -> None:
            values[out] = function(values[a], values[b]) if pair else function(values[a])

        return f"{out} = {op_type} ({f'{a}, {b}' if pair else a})", pointwise

    def branch(self, names: list[str], depth: int) -> tuple[str, Run]:
        """On the sign of a sum."""
        condition, out, source = self.name("c"), self.name("v"), self._draw(st.sampled_from(names))
        sides = []
        for label in ("then", "else"):
            inside = list(names)
            text, run = self.block(inside, depth)
            sides.append((label, text, run, inside[-1]))
        names.append(out)
        bodies = ", ".join(
            f"{label}_branch = {self.name('g')} () => ({SHAPE} {result}) {{ {text} }}"
            for label, text, _, result in sides
        )
        total, zero = self.name("t"), "zero"

        def run(values: dict[str, torch.Tensor]) -> None:
            _, _, step, result = sides[0 if values[source].sum().item() > 0 else 1]
            inner = dict(values)
            step(inner)
            values[out] = inner[result]

        return (
            f"{total} = ReduceSum <keepdims = 0> ({source})\n{condition} = Greater ({total}, {zero})\n"
            f"{out} = If ({condition}) <{bodies}>",
            run,
        )

    def loop(self, names: list[str], depth: int) -> tuple[str, Run]:
        """Up to k times, as long as the state's mean square is below a limit; also the sum of what it stacks."""
        state, out, stacked, last = (self.name("v") for _ in range(4))
        start = self._draw(st.sampled_from(names))
        inside = [*names, state]
        text, step = self.block(inside, depth)
        following, emitted = inside[-1], self._draw(st.sampled_from(inside[-2:]))
        copy, goes_on, square, number, ignored = (self.name(p) for p in ("v", "c", "q", "i", "c"))
        early = self._draw(st.booleans())
        decide = (
            f"{square} = ReduceSumSquare <keepdims = 0> ({following}) {goes_on} = Less ({square}, limit)"
            if early
            else f"{goes_on} = Identity ({ignored})"
        )
        after = self.name("v")
        body = (
            f"{self.name('g')} (int64 {number}, bool {ignored}, {SHAPE} {state}) => (bool {goes_on}, {SHAPE} {after}, "
            f"{SHAPE} {copy}) {{ {text} {decide} {after} = Identity ({following}) {copy} = Identity ({emitted}) }}"
        )
        names.extend([out, last])

        def run(values: dict[str, torch.Tensor]) -> None:
            h, total = values[start], torch.zeros_like(values[start])
            for _ in range(int(values["k"])):
                inner = values | {state: h}
                step(inner)
                h = inner[following]
                total = total + inner[emitted]
                if early and not (h * h).sum().item() < 6.0:
                    break
            values[out] = h
            values[last] = h + total

        total = self.name("t")
        return (
            f"{out}, {stacked} = Loop (k, true, {start}) <body = {body}>\n"
            f"{total} = ReduceSum <keepdims = 0> ({stacked}, first)\n{last} = Add ({out}, {total})",
            run,
        )

    def scan(self, names: list[str], depth: int) -> tuple[str, Run]:
        """Over s, in either direction; the result is the state and the sum of what it stacks."""
        state, item, out, stacked, total, last, after, copy = (self.name("v") for _ in range(8))
        start, back = self._draw(st.sampled_from(names)), self._draw(st.integers(0, 1))
        inside = [*names, state, item]
        text, step = self.block(inside, depth)
        following, emitted = inside[-1], self._draw(st.sampled_from(inside[-2:]))
        names.extend([out, last])
        body = (
            f"{self.name('g')} ({SHAPE} {state}, {SHAPE} {item}) => ({SHAPE} {after}, {SHAPE} {copy}) "
            f"{{ {text} {after} = Identity ({following}) {copy} = Identity ({emitted}) }}"
        )

        def run(values: dict[str, torch.Tensor]) -> None:
            h, added = values[start], torch.zeros_like(values[start])
            for row in list(values["s"])[:: -1 if back else 1]:
                inner = values | {state: h, item: row}
                step(inner)
                h = inner[following]
                added = added + inner[emitted]
            values[out] = h
            values[last] = h + added

        return (
            f"{out}, {stacked} = Scan ({start}, s) <num_scan_inputs = 1, scan_input_directions = [{back}], "
            f"scan_output_directions = [{back}], body = {body}>\n"
            f"{total} = ReduceSum <keepdims = 0> ({stacked}, first)\n{last} = Add ({out}, {total})",
            run,
        )
