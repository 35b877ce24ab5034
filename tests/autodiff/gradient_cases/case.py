"""One operator call with inputs, from which the contract test makes models and finds gradients in other ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

Draw = Callable[[st.SearchStrategy[Any]], Any]
Array = np.ndarray


def try_examples(check: Callable[[Any], None], strategy: st.SearchStrategy[Any], count: int) -> None:
    """Call `check` with `count` values of the strategy, the same in every run."""
    chosen = settings(max_examples=count, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    chosen(given(strategy)(check))()


@dataclass
class Case:
    """`inputs` in float64 where they are floating point; None is an optional input left out.

    `constants`: indices of inputs that are initializers. `free`: per input the axes that are declared symbolic.
    `rank` declares that of the output, where ONNX's inference does not find it.
    `torch` computes the same with PyTorch, from the inputs as tensors: the first output, or a tuple of those in `of`.
    `single`: the operator exists in float32 only, too coarse for finite differences (which do not see quantization at
    all); `torch` alone, in float64, says what its gradient is.
    `outputs` is how many the node has ("" in `unused` leaves one out), `of` which of them have cotangents.
    `bodies`: text of the node's bodies by attribute, with T for the floating-point type; they, and not the node, read
    the inputs in `captured`. `declared`: the shapes of the outputs.
    """

    op_type: str
    inputs: Sequence[Array | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()
    free: dict[int, set[int]] = field(default_factory=dict)
    torch: Callable[..., Tensor | tuple[Tensor, ...]] | None = None
    outputs: int = 1
    rank: int | None = None
    of: tuple[int, ...] = (0,)
    unused: frozenset[int] = frozenset()
    single: bool = False
    bodies: dict[str, str] = field(default_factory=dict)
    captured: frozenset[int] = frozenset()
    declared: Sequence[Sequence[int | str]] | None = None

    @property
    def output_names(self) -> list[str]:
        return ["" if i in self.unused else f"y{i}" if i else "y" for i in range(self.outputs)]

    @property
    def targets(self) -> list[str]:
        """Names of the outputs in `of`."""
        return [self.output_names[i] for i in self.of]

    @property
    def names(self) -> list[str]:
        return [f"x{i}" for i in range(len(self.inputs))]

    @property
    def wrt(self) -> list[int]:
        """Indices of the inputs that have a gradient."""
        return [
            i
            for i, value in enumerate(self.inputs)
            if value is not None and i not in self.constants and value.dtype.kind == "f"
        ]

    def arrays(self, dtype: npt.DTypeLike) -> dict[str, Array]:
        """What the model is fed with."""
        return {
            name: self._cast(value, dtype)
            for i, (name, value) in enumerate(zip(self.names, self.inputs))
            if value is not None and i not in self.constants
        }

    def model(self, dtype: npt.DTypeLike) -> onnx.ModelProto:
        """A model of one node, outputs `y`, `y1`, ..., with float inputs of this type."""
        inputs, initializers = [], []
        for i, (name, value) in enumerate(zip(self.names, self.inputs)):
            if value is None:
                continue
            array = self._cast(value, dtype)
            if i in self.constants:
                initializers.append(numpy_helper.from_array(array, name))
            else:
                free = self.free.get(i, set())
                shape = [f"d{i}_{a}" if a in free else n for a, n in enumerate(array.shape)]
                inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))
        used = [
            name if value is not None else ""
            for i, (name, value) in enumerate(zip(self.names, self.inputs))
            if i not in self.captured
        ]
        attributes = dict(self.attributes)
        for name, text in self.bodies.items():
            typed = text.replace("T[", "float[" if dtype == np.float32 else "double[")
            attributes[name] = onnx.parser.parse_graph(typed)
        out_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        if self.op_type == "Cast":
            attributes["to"] = out_type = _cast_target(dtype)
        node = helper.make_node(self.op_type, used, self.output_names, name="node", **attributes)
        shape = None if self.rank is None else [f"y_{axis}" for axis in range(self.rank)]
        shapes = [shape] * len(self.of) if self.declared is None else [self.declared[i] for i in self.of]
        results = [helper.make_tensor_value_info(n, out_type, s) for n, s in zip(self.targets, shapes)]
        graph = helper.make_graph([node], "case", inputs, results, initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def _cast(self, value: Array, dtype: npt.DTypeLike) -> Array:
        # What is in float32 here is so in ONNX, whatever the type of the data: scales of Resize.
        return np.asarray(value, dtype) if value.dtype == np.float64 else np.asarray(value)

    def __repr__(self) -> str:
        shapes = [None if v is None else (v.dtype.name, v.shape) for v in self.inputs]
        return f"Case({self.op_type}, {shapes}, {self.attributes}, free={self.free})"


def _cast_target(dtype: npt.DTypeLike) -> int:
    # To the other floating-point type; both have kernels everywhere.
    return int(TensorProto.FLOAT if np.dtype(dtype) == np.float64 else TensorProto.DOUBLE)


def normal(draw: Draw, *shape: int) -> Array:
    return np.asarray(_rng(draw).standard_normal(shape))


def away_from_zero(draw: Draw, *shape: int) -> Array:
    """Of either sign, absolute values from 0.3 up: for poles and kinks at 0."""
    rng = _rng(draw)
    return np.asarray(rng.choice([-1.0, 1.0], shape) * (0.3 + rng.random(shape)))


def positive(draw: Draw, *shape: int) -> Array:
    return np.asarray(0.3 + _rng(draw).random(shape))


def distinct(draw: Draw, *shape: int) -> Array:
    """No two elements closer than any step of a finite difference: for maxima."""
    size = int(np.prod(shape))
    return (_rng(draw).permutation(size).reshape(shape) - size / 2) / max(size, 1) * 4


def free_axes(draw: Draw, shape: Sequence[int], among: Sequence[int] | None = None) -> set[int]:
    """Some axes to declare symbolic; sizes of 1 stay, as broadcasting reads them."""
    axes = [a for a in (range(len(shape)) if among is None else among) if shape[a] != 1]
    return set(draw(st.lists(st.sampled_from(axes), unique=True))) if axes else set()


def shapes(minimum: int = 0, maximum: int = 3, size: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, size), min_size=minimum, max_size=maximum)


def broadcast_shapes(draw: Draw, count: int) -> list[list[int]]:
    """Shapes that broadcast to one another."""
    full = draw(shapes(0, 3))
    found = []
    for _ in range(count):
        shape = [draw(st.sampled_from([d, 1])) for d in full]
        found.append(shape[draw(st.integers(0, len(shape))) :])
    return found


def _rng(draw: Draw) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
