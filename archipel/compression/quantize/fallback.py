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
"""How many of the chosen layers are tried one by one, whether they can be integers after all."""


def sensitivities(
    source: ir.Model,
    scheme: Scheme,
    calibrated: Calibrated,
    examples: Examples,
    exclude: Collection[str],
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """By layer name, the signal-to-noise ratio in dB of the first output when that layer alone is rounded.

    One graph serves for all layers: every rounding has a switch, and the switches are an input. So ONNX Runtime opens
    one session, and a run with all switches off is the float network.
    """
    switched, names = _with_switches(source, scheme, calibrated, exclude)
    index = {name: i for i, name in enumerate(names)}
    quantized = layers(source.graph, constants(source.graph), exclude)
    layer_names = list(dict.fromkeys(layer.name for layer in quantized))
    run = open_session(switched)
    size = fixed_batch(switched) or EXAMPLES
    fields = dict(examples.take(slice(0, size)).fields)
    exact = run({**fields, SWITCHES: np.zeros(len(names), bool)})[0]
    result = {}
    for number, layer in enumerate(layer_names, start=1):
        progress(number, len(layer_names))
        # A layer also needs its input, and what shares its scale, rounded: ask which values that are.
        alone = place(
            source.graph, constants(source.graph), [*exclude, *(name for name in layer_names if name != layer)]
        )
        on = np.zeros(len(names), bool)
        used = {str(value.name) for value in [*alone.rounded, *alone.sharing]} | {
            quantized_layer.key for quantized_layer in alone.layers
        }
        on[[index[name] for name in used if name in index]] = True
        noise = run({**fields, SWITCHES: on})[0] - exact
        power = float(np.square(noise, dtype=np.float64).mean())
        signal = float(np.square(exact, dtype=np.float64).mean())
        result[layer] = 10 * float(np.log10(max(signal, 1e-30) / max(power, 1e-30)))
    return result


def _with_switches(
    source: ir.Model, scheme: Scheme, calibrated: Calibrated, exclude: Collection[str]
) -> tuple[Model, list[str]]:
    """The simulation with a switch for every rounding, and the name of each: a value's name or `Layer.key`."""
    names: list[str] = []
    base = source.clone()
    # A symbolic size: how many switches there are is known only after `simulate`.
    switches = Builder(base.graph).input(SWITCHES, ir.DataType.BOOL, ["switches"])

    def switch(op: Builder, name: str, exact: ir.Value, rounded: ir.Value) -> ir.Value:
        # `simulate` works on a clone of `base`, which has an input of its own.
        given = next(value for value in op.graph.inputs if value.name == switches.name)
        names.append(name)
        result = op.Where(op.Gather(given, np.array(len(names) - 1)), rounded, exact)
        result.shape = exact.shape
        return result

    simulated, _ = simulate(base, scheme, calibrated, exclude, switch)
    return Model(simulated), names


def choose_float_layers(ranked: Sequence[str], allowed: Callable[[Collection[str]], bool]) -> list[str]:
    """Few layers of `ranked` (worst first) with which the network is `allowed` when they stay in float.

    The number of layers doubles until the network is allowed, then is bisected; then single layers go back to integers
    where that is allowed. If nothing less is allowed, all layers are chosen: that is the float network.
    """
    low, high = 0, 0
    while high < len(ranked) and not allowed(ranked[:high]):
        low, high = high + 1, min(max(2 * high, 1), len(ranked))
    # `high` layers are enough, fewer than `low` are not.
    while low < high:
        middle = (low + high) // 2
        if allowed(ranked[:middle]):
            high = middle
        else:
            low = middle + 1
    chosen = list(ranked[:high])
    # From the least sensitive on. The last one is needed: without it bisection would have ended earlier.
    for name in chosen[:-1][::-1][:_RETURNS]:
        rest = [other for other in chosen if other != name]
        if allowed(rest):
            chosen = rest
    return chosen
