"""Which layers stay in float: as few as keep the loss of quality within a budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx_ir as ir

from archipel.compression.deploy import constants
from archipel.compression.examples import Examples, fixed_batch
from archipel.compression.quantize.placement import layers, place
from archipel.compression.quantize.simulation import Calibrated, Scheme, simulate
from archipel.compression.score import open_session
from archipel.graph import Builder, Model

SWITCHES = "archipel.switches"
EXAMPLES = 64
_RETURNS = 8
"""How many layers are tried on their own whether they can go back to integers after all."""


def sensitivities(
    source: ir.Model,
    scheme: Scheme,
    found: Calibrated,
    examples: Examples,
    exclude: Collection[str],
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """By layer name, the signal-to-noise ratio in dB of the first output where that layer alone is rounded.

    One graph serves for all: every rounding has a switch, and the switches are an input.
    """
    work, names = _switched(source, scheme, found, exclude)
    index = {name: i for i, name in enumerate(names)}
    quantized = layers(source.graph, constants(source.graph), exclude)
    every = list(dict.fromkeys(layer.name for layer in quantized))
    run = open_session(work)
    size = fixed_batch(work) or EXAMPLES
    fields = dict(examples.take(slice(0, size)).fields)
    exact = run({**fields, SWITCHES: np.zeros(len(names), bool)})[0]
    result = {}
    for number, layer in enumerate(every, start=1):
        progress(number, len(every))
        alone = place(source.graph, constants(source.graph), [*exclude, *(name for name in every if name != layer)])
        on = np.zeros(len(names), bool)
        used = {str(value.name) for value in [*alone.rounded, *alone.sharing]} | {one.key for one in alone.layers}
        on[[index[name] for name in used if name in index]] = True
        noise = run({**fields, SWITCHES: on})[0] - exact
        power = float(np.square(noise, dtype=np.float64).mean())
        signal = float(np.square(exact, dtype=np.float64).mean())
        result[layer] = 10 * float(np.log10(max(signal, 1e-30) / max(power, 1e-30)))
    return result


def _switched(source: ir.Model, scheme: Scheme, found: Calibrated, exclude: Collection[str]) -> tuple[Model, list[str]]:
    names: list[str] = []
    base = source.clone()
    # The input has its size once all roundings are there.
    switches = Builder(base.graph).input(SWITCHES, ir.DataType.BOOL, ["switches"])

    def switch(op: Builder, name: str, exact: ir.Value, rounded: ir.Value) -> ir.Value:
        given = next(value for value in op.graph.inputs if value.name == switches.name)
        names.append(name)
        result = op.Where(op.Gather(given, np.array(len(names) - 1)), rounded, exact)
        result.shape = exact.shape
        return result

    work, _ = simulate(base, scheme, found, exclude, switch)
    return Model(work), names


def choose_float_layers(ranked: Sequence[str], allowed: Callable[[Collection[str]], bool]) -> list[str]:
    """Few of `ranked`, worst first, that are enough to be `allowed` when they stay in float.

    Doubles how many of the worst are left out until that is allowed, bisects, then tries whether single ones can go
    back. All of them where none less will do: that is the float network.
    """
    low, high = 0, 0
    while high < len(ranked) and not allowed(ranked[:high]):
        low, high = high + 1, min(max(2 * high, 1), len(ranked))
    while low < high:
        middle = (low + high) // 2
        if allowed(ranked[:middle]):
            high = middle
        else:
            low = middle + 1
    chosen = list(ranked[:high])
    # The last one was needed, or bisecting had gone on.
    for name in chosen[:-1][::-1][:_RETURNS]:
        rest = [other for other in chosen if other != name]
        if allowed(rest):
            chosen = rest
    return chosen
