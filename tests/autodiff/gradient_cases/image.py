from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gradient_cases.case import Case, Draw, free_axes, normal
from hypothesis import strategies as st
from torch.nn import functional as F

# (rank, axes to resample) that ONNX Runtime has kernels for.
NEAREST = [(1, [0]), (2, [0, 1]), (3, [2]), (4, [2, 3]), (4, [1, 3]), (4, [0, 1, 2, 3]), (5, [2, 3, 4])]
LINEAR = [(2, [0, 1]), (4, [2, 3]), (4, [1, 2]), (4, [3]), (5, [2, 3, 4]), (3, [0, 1, 2])]
CUBIC = [(2, [0, 1]), (4, [2, 3]), (4, [3])]
COORDINATES = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]
ROUNDING = ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]


@st.composite
def resize(draw: Draw) -> Case:
    mode = draw(st.sampled_from(["nearest", "linear", "cubic"]))
    rank, over = draw(st.sampled_from({"nearest": NEAREST, "linear": LINEAR, "cubic": CUBIC}[mode]))
    coordinates = draw(st.sampled_from([*COORDINATES, "half_pixel", "tf_crop_and_resize"]))
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        attributes["nearest_mode"] = draw(st.sampled_from(ROUNDING))
    if mode == "cubic":
        attributes["cubic_coeff_a"] = draw(st.sampled_from([-0.75, -0.5]))
        attributes["exclude_outside"] = draw(st.integers(0, 1)) if coordinates != "tf_crop_and_resize" else 0
    if mode != "nearest" and coordinates != "tf_crop_and_resize" and (rank, over) == (4, [2, 3]):
        attributes["antialias"] = draw(st.integers(0, 1))
    shape = [draw(st.integers(1, 2)) for _ in range(rank)]
    scales = [1.0] * rank
    whole = draw(st.booleans())
    for axis in over:
        # Exact in float32, so that what is nearest does not hang on the last bit.
        # exclude_outside divides by what may be little, which float32 does not survive at thirds.
        halves = [2.0, 0.5] if attributes.get("exclude_outside") else [2.0, 0.5, 1.5, 0.75, 2.5]
        scales[axis] = draw(st.sampled_from([2.0, 3.0] if whole and len(halves) > 2 else halves))
        shape[axis] = draw(st.integers(2, 4))
    listed = list(range(rank))
    if draw(st.booleans()):
        listed = draw(st.permutations(over))
        attributes["axes"] = [axis - draw(st.sampled_from([0, rank])) for axis in listed]
    x = normal(draw, *shape)
    inputs: list[np.ndarray | None] = [x, None, np.array([scales[axis] for axis in listed], np.float32)]
    by_size = draw(st.booleans())
    lengths = [int(size * scale) for size, scale in zip(shape, scales)]
    if by_size:
        inputs = [x, None, None, np.array([lengths[axis] for axis in listed], np.int64)]
        if coordinates == "half_pixel" and sorted(listed) == over:
            policy = draw(st.sampled_from(["stretch", "not_larger", "not_smaller"]))
            attributes["keep_aspect_ratio_policy"] = policy
            if policy != "stretch" and "axes" in attributes:
                # ONNX Runtime forgets the policy on negative axes.
                attributes["axes"] = list(listed)
    among = [axis for axis in range(rank) if axis not in listed or (not by_size and scales[axis] == 1.0)]
    if coordinates == "tf_crop_and_resize":
        # Cropped where it is resampled: at scale 1 runtimes copy.
        cropped = [scales[axis] != 1.0 and lengths[axis] != shape[axis] for axis in listed]
        starts = [draw(st.sampled_from([0.125, -0.25])) if crop else 0.0 for crop in cropped]
        ends = [draw(st.sampled_from([0.875, 1.25])) if crop else 1.0 for crop in cropped]
        inputs[1] = np.array(starts + ends, np.float32)
        attributes["extrapolation_value"] = 2.5
    elif repeats(mode, coordinates, attributes) and whole and not by_size:
        among = list(range(rank))
    free = free_axes(draw, shape, among)
    constants = frozenset(range(1, len(inputs)))
    return Case("Resize", inputs, attributes, constants, {0: free}, interpolate(inputs, attributes, over, lengths))


def repeats(mode: str, coordinates: str, attributes: dict[str, Any]) -> bool:
    """Whether a whole scale repeats elements, so that the size may be symbolic."""
    return mode == "nearest" and (coordinates, attributes["nearest_mode"]) in (
        ("asymmetric", "floor"),
        ("half_pixel", "round_prefer_floor"),
        ("half_pixel", "round_prefer_ceil"),
    )


def interpolate(
    inputs: list[Any], attributes: dict[str, Any], over: list[int], lengths: list[int]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The same with PyTorch, where it has it."""
    mode, coordinates = attributes["mode"], attributes["coordinate_transformation_mode"]
    rank = inputs[0].ndim
    plain = not (attributes.get("antialias") or attributes.get("exclude_outside"))
    if len(inputs) < 4 or attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    if over != list(range(2, rank)) or not plain or coordinates not in ("half_pixel", "align_corners"):
        return None
    if mode == "nearest" or (mode == "cubic" and attributes["cubic_coeff_a"] != -0.75):
        return None
    name = "bicubic" if mode == "cubic" else {4: "bilinear", 5: "trilinear"}[rank]

    def function(x: torch.Tensor, *_: object) -> torch.Tensor:
        return F.interpolate(x, size=lengths[2:], mode=name, align_corners=coordinates == "align_corners")

    return function


CASES = {("", "Resize"): resize()}
