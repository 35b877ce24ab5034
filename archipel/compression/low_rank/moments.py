"""Second moments of layers' inputs over calibration data: they tell which directions of a weight matter."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.compression.examples import Examples, fixed_batch
from archipel.compression.low_rank.splits import Split, Window
from archipel.compression.score import open_session
from archipel.graph import Builder, Model
from archipel.training.batch_norm import prepared

_BATCH = 32
_PLACES = 32
"""Windows of each picture that are read, drawn by the seed."""


def moments(
    model: Model, sources: Mapping[str, str], splits: Mapping[str, tuple[Split, ...]], examples: Examples, seed: int
) -> dict[str, list[np.ndarray]]:
    """For each layer and split E[x x^T], [rows, rows], of the inputs x of the split's first layer.

    `sources`: layer -> name of the value that it reads. BatchNormalization is in inference mode.
    """
    work = prepared(model, "frozen")
    op = Builder(work.ir.graph)
    known = {value.name: value for node in work.ir.graph for value in node.outputs}
    known.update({value.name: value for value in work.ir.graph.inputs})
    names = list(dict.fromkeys(sources.values()))
    outputs = [str(op.name_output(op.Identity(known[name]), f"{name}/read").name) for name in names]
    run = open_session(work, outputs=outputs)
    rng = np.random.default_rng(seed)
    sums = {layer: [np.zeros((len(s.matrix),) * 2) for s in layer_splits] for layer, layer_splits in splits.items()}
    counts = {layer: [0] * len(layer_splits) for layer, layer_splits in splits.items()}
    size = fixed_batch(model) or _BATCH
    for batch in examples.batches(size):
        # A graph of a fixed batch cannot run the smaller last one.
        if len(batch) < size and fixed_batch(model):
            break
        values = dict(zip(names, run(dict(batch.fields))))
        for layer, source in sources.items():
            for number, split in enumerate(splits[layer]):
                x = values[source].astype(np.float64)
                first = None if split.windows is None else split.windows[0]
                rows = x.reshape(-1, x.shape[-1]) if first is None else windows(x, first, _PLACES, rng)
                # Sums of products, so that no batch needs to be kept.
                sums[layer][number] += rows.T @ rows
                counts[layer][number] += len(rows)
    return {layer: [_shrink(s, c) for s, c in zip(sums[layer], counts[layer])] for layer in sums}


def windows(x: np.ndarray, window: Window, places: int, rng: np.random.Generator) -> np.ndarray:
    """[batch, channels, ...] -> [batch * places, channels * kernel]: what a convolution reads at random places."""
    spatial = x.shape[2:]
    reach = [(k - 1) * d + 1 for k, d in zip(window.kernel, window.dilations)]
    padded = np.pad(x, [(0, 0), (0, 0), *_pads(window, spatial, reach)])
    ends = [(size - r) // s + 1 for size, r, s in zip(padded.shape[2:], reach, window.strides)]
    rows = []
    for _ in range(min(places, int(np.prod(ends)))):
        # The same place for all pictures of the batch: one slice instead of many.
        starts = [int(rng.integers(end)) * stride for end, stride in zip(ends, window.strides)]
        cut = tuple(slice(at, at + r, d) for at, r, d in zip(starts, reach, window.dilations))
        rows.append(padded[(slice(None), slice(None), *cut)].reshape(len(x), -1))
    return np.concatenate(rows)


def _shrink(total: np.ndarray, count: int) -> np.ndarray:
    """The mean of `count` products, shrunk towards a multiple of the identity, the more the fewer there are per row.

    Otherwise a layer of 3000 inputs would be fitted to the 512 examples of the calibration data alone.
    """
    rows = len(total)
    share = rows / (rows + count)
    mean = total / max(count, 1)
    shrunk: np.ndarray = (1.0 - share) * mean + share * np.trace(mean) / rows * np.eye(rows)
    return shrunk


def _pads(window: Window, sizes: tuple[int, ...], reach: list[int]) -> list[tuple[int, int]]:
    """Padding before and behind each spatial axis, as ONNX defines it for pads and auto_pad."""
    if window.pads is not None:
        count = len(sizes)
        return list(zip(window.pads[:count], window.pads[count:]))
    if window.auto_pad == "VALID":
        return [(0, 0)] * len(sizes)
    pads = []
    for size, r, stride in zip(sizes, reach, window.strides):
        total = max((-(-size // stride) - 1) * stride + r - size, 0)
        small = total // 2
        pads.append((small, total - small) if window.auto_pad == "SAME_UPPER" else (total - small, small))
    return pads
