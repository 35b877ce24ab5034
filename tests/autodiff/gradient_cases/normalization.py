from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from gradient_cases.case import Case, Draw, away_from_zero, free_axes, normal, positive
from hypothesis import strategies as st
from torch.nn import functional as F

EPSILON = st.sampled_from([None, 1e-3, 0.1])


def _attributes(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _exact(value: float | None, default: float) -> float:
    """As an attribute holds it."""
    return float(np.float32(default if value is None else value))


def _enough(sizes: list[int]) -> list[int]:
    """Two numbers always normalize to -1 and 1: with less than three, a gradient in float32 is all rounding error."""
    return sizes if int(np.prod(sizes)) > 2 else [*sizes[:-1], 3]


@st.composite
def batch_normalization(draw: Draw) -> Case:
    spatial = draw(st.lists(st.integers(1, 3), max_size=3))
    channels = draw(st.integers(1, 3))
    single = draw(st.integers(0, 9)) == 0
    shape = [draw(st.integers(2, 4))] if single else [draw(st.integers(1, 3)), channels, *spatial]
    channels = 1 if single else channels
    x = normal(draw, *shape) * 2 + draw(st.sampled_from([0, 3]))
    inputs = [x, away_from_zero(draw, channels), normal(draw, channels), normal(draw, channels)]
    epsilon = draw(EPSILON)
    free = {0: free_axes(draw, shape), **{i: free_axes(draw, [channels]) for i in range(1, 5) if draw(st.booleans())}}

    def function(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        scale, bias, mean, var = rest
        y = F.batch_norm(x.reshape(-1, 1) if single else x, mean, var, scale, bias, eps=_exact(epsilon, 1e-5))
        return y.reshape(x.shape)

    # PyTorch has no gradient for the statistics.
    constants = frozenset({3, 4}) if draw(st.booleans()) else frozenset()
    return Case(
        "BatchNormalization",
        [*inputs, positive(draw, channels)],
        _attributes(epsilon=epsilon, training_mode=draw(st.sampled_from([None, 0]))),
        constants=constants,
        free={i: axes for i, axes in free.items() if i not in constants},
        torch=function if constants else None,
    )


@st.composite
def batch_normalization_training(draw: Draw) -> Case:
    channels = draw(st.integers(1, 3))
    shape = [draw(st.integers(3, 5)), channels, *draw(st.lists(st.integers(1, 3), max_size=3))]
    x = normal(draw, *shape) + draw(st.sampled_from([0, 3]))
    epsilon, momentum = draw(EPSILON), draw(st.sampled_from([None, 0.0, 0.25, 1.0]))
    keep = _exact(momentum, 0.9)
    of = draw(st.sampled_from([(0,), (0,), (0, 1), (0, 1, 2), (1,), (2,), (1, 2)]))

    def function(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale, bias, mean, var = rest
        axes = [axis for axis in range(x.ndim) if axis != 1]
        y = F.batch_norm(x, None, None, scale, bias, training=True, eps=_exact(epsilon, 1e-5))
        found = (
            y,
            mean * keep + x.mean(axes) * (1 - keep),
            var * keep + x.var(axes, correction=0) * (1 - keep),
        )
        # What does not depend on an input still gives it zeros.
        return tuple(found[i] + 0 * sum(value.sum() for value in (x, *rest)) for i in of)

    return Case(
        "BatchNormalization",
        [x, away_from_zero(draw, channels), normal(draw, channels), normal(draw, channels), positive(draw, channels)],
        _attributes(epsilon=epsilon, momentum=momentum, training_mode=1),
        free={0: free_axes(draw, shape)},
        torch=function,
        outputs=3,
        of=of,
    )


@st.composite
def instance_normalization(draw: Draw) -> Case:
    channels = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 3)), channels, *_enough(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))]
    epsilon = draw(EPSILON)
    # Either says how many channels there are.
    open_scale = draw(st.booleans())
    return Case(
        "InstanceNormalization",
        [normal(draw, *shape), normal(draw, channels), normal(draw, channels)],
        _attributes(epsilon=epsilon),
        free={
            0: free_axes(draw, shape, [0, *range(1 + open_scale, len(shape))]),
            1: free_axes(draw, [channels]) if open_scale else set(),
        },
        torch=lambda x, s, b: F.instance_norm(x, None, None, s, b, eps=_exact(epsilon, 1e-5)),
    )


@st.composite
def group_normalization(draw: Draw) -> Case:
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels = groups * per_group
    spatial = draw(st.lists(st.integers(1, 3), max_size=3))
    shape = [draw(st.integers(1, 3)), channels, *spatial]
    if int(np.prod(spatial)) * per_group < 3:
        shape = [*shape[:2], 3]
    epsilon = draw(EPSILON)
    return Case(
        "GroupNormalization",
        [normal(draw, *shape) + draw(st.sampled_from([0, 2])), normal(draw, channels), normal(draw, channels)],
        _attributes(epsilon=epsilon, num_groups=groups, stash_type=draw(st.sampled_from([None, 1, 11]))),
        free={0: free_axes(draw, shape)},
        rank=len(shape),
        torch=lambda x, s, b: F.group_norm(x, groups, s, b, eps=_exact(epsilon, 1e-5)),
    )


class WithStatistics(Case):
    """LayerNormalization's statistics are float32 whatever X is (stash_type 1)."""

    def model(self, dtype: npt.DTypeLike) -> onnx.ModelProto:
        proto = super().model(dtype)
        for value in proto.graph.output:
            if value.name != "y":
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        return proto


@st.composite
def layer_normalization(draw: Draw) -> Case:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    shape[axis:] = _enough(shape[axis:])
    normalized, epsilon = shape[axis:], draw(EPSILON)
    x = normal(draw, *shape) + draw(st.sampled_from([0, 2]))

    def affine() -> list[int]:
        smaller = [draw(st.sampled_from([d, d, 1])) for d in normalized][draw(st.integers(0, len(normalized))) :]
        leading = [1] * draw(st.integers(0, len(shape) - len(normalized)))
        return draw(st.sampled_from([normalized, normalized, smaller, [*leading, *normalized]]))

    scale, bias = affine(), affine() if draw(st.booleans()) else None
    of = draw(st.sampled_from([(0,), (0,), (0, 1), (0, 1, 2), (2,), (1, 2), (0, 2)]))
    outputs = max(of) + 1 if draw(st.booleans()) else 3
    unused = frozenset(set(range(1, outputs - 1)) - set(of)) if draw(st.booleans()) else frozenset()
    if 0 not in of:
        # Without Y the affine part has no influence.
        bias = None

    def function(x: torch.Tensor, s: torch.Tensor, b: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        flat = x.reshape(*x.shape[: axis % len(shape)], -1)
        ones = [1] * len(normalized)
        mean = flat.mean(-1).reshape(*x.shape[: axis % len(shape)], *ones)
        inverse = (flat.var(-1, correction=0) + _exact(epsilon, 1e-5)).rsqrt().reshape(mean.shape)
        y = F.layer_norm(x, normalized, eps=_exact(epsilon, 1e-5)) * s + (0 if b is None else b)
        return tuple((y, mean, inverse)[i] + 0 * s.sum() for i in of)

    return WithStatistics(
        "LayerNormalization",
        [x, normal(draw, *scale), *([] if bias is None else [normal(draw, *bias)])],
        _attributes(epsilon=epsilon, axis=None if axis == -1 else axis, stash_type=draw(st.sampled_from([None, 1]))),
        free={0: free_axes(draw, shape), 1: free_axes(draw, scale)},
        torch=function,
        outputs=outputs,
        of=of,
        unused=unused,
    )


@st.composite
def lp_normalization(draw: Draw) -> Case:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1)))
    p = draw(st.sampled_from([None, 1, 2]))
    return Case(
        "LpNormalization",
        [away_from_zero(draw, *shape)],
        _attributes(axis=axis, p=p),
        free={0: free_axes(draw, shape)},
        torch=lambda x: F.normalize(x, p=p or 2, dim=-1 if axis is None else axis),
    )


@st.composite
def dropout(draw: Draw) -> Case:
    """Where nothing is dropped; the masks are tested in test_dropout.py, as each runtime draws its own."""
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    kind = draw(st.sampled_from(["default", "ratio", "off", "off without ratio", "on with ratio 0", "at run time"]))
    ratio = np.asarray(0.0 if kind == "on with ratio 0" else draw(st.sampled_from([0.0, 0.25, 0.5])))
    inputs: list[np.ndarray | None] = [normal(draw, *shape)]
    if kind != "default":
        inputs.append(None if kind == "off without ratio" else ratio)
    if kind not in ("default", "ratio"):
        inputs.append(np.asarray(kind == "on with ratio 0"))
    constants = set() if kind == "at run time" else {2}
    # On the edge of 0 the mask changes: there is no difference quotient of the ratio.
    if kind == "on with ratio 0" or draw(st.booleans()):
        constants.add(1)
    return Case(
        "Dropout",
        inputs,
        _attributes(seed=draw(st.sampled_from([None, 7]))),
        constants=frozenset(i for i in constants if i < len(inputs) and inputs[i] is not None),
        free={0: free_axes(draw, shape)},
        outputs=draw(st.integers(1, 2)),
    )


CASES = {
    ("", "BatchNormalization"): st.one_of(batch_normalization(), batch_normalization_training()),
    ("", "InstanceNormalization"): instance_normalization(),
    ("", "GroupNormalization"): group_normalization(),
    ("", "LayerNormalization"): layer_normalization(),
    ("", "LpNormalization"): lp_normalization(),
    ("", "Dropout"): dropout(),
}
