"""Lowerings beyond the gradient contract: outputs and operators without gradient, and forms that it seldom draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.lite_runtime.engines.onnx_runtime import open_exact
from archipel.training.cloud import TorchModule

RNG = np.random.default_rng(0)
FLOATS = TensorProto.FLOAT


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def bytes_of(*shape: int, kind: type = np.uint8) -> np.ndarray:
    limits = np.iinfo(kind)
    return RNG.integers(limits.min, limits.max, shape, kind, endpoint=True)


@dataclass(frozen=True)
class Node:
    """`constants`: which inputs are initializers; `free`: axes of the first input that are symbolic.

    `reference`: onnx.reference computes what is expected, where ONNX Runtime has no kernel, or one that overflows.
    """

    op_type: str
    inputs: Sequence[np.ndarray | None]
    outputs: Sequence[int] = (FLOATS,)
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: Sequence[int] = ()
    free: Sequence[int] = ()
    reference: bool = False

    def proto(self) -> onnx.ModelProto:
        names = ["" if value is None else f"x{i}" for i, value in enumerate(self.inputs)]
        ports, stored = [], []
        for i, value in enumerate(self.inputs):
            if value is None:
                continue
            if i in self.constants:
                stored.append(numpy_helper.from_array(np.asarray(value), names[i]))
                continue
            shape = [f"d{axis}" if i == 0 and axis in self.free else size for axis, size in enumerate(value.shape)]
            ports.append(helper.make_tensor_value_info(names[i], helper.np_dtype_to_tensor_dtype(value.dtype), shape))
        results = [helper.make_tensor_value_info(f"y{i}", kind, None) for i, kind in enumerate(self.outputs)]
        node = helper.make_node(self.op_type, names, [r.name for r in results], name="node", **self.attributes)
        graph = helper.make_graph([node], "case", ports, results, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def fed(self) -> dict[str, np.ndarray]:
        given = enumerate(self.inputs)
        return {f"x{i}": np.asarray(value) for i, value in given if value is not None and i not in self.constants}


def pool(*shape: int, free: Sequence[int] = (), **attributes: Any) -> Node:
    return Node("MaxPool", [real(*shape)], (FLOATS, TensorProto.INT64), attributes, free=free)


def grid(mode: str, padding: str, align: int) -> Node:
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    return Node("GridSample", [real(2, 3, 5, 6), 1.3 * real(2, 4, 3, 2)], attributes=attributes)


def mean(*shape: int, free: Sequence[int] = (), **attributes: Any) -> Node:
    return Node("AveragePool", [real(*shape)], attributes=attributes, free=free)


def layer(op_type: str, gates: int, lengths: Sequence[int] | None, outputs: int, **attributes: Any) -> Node:
    """5 steps of 3 sequences with 2 features, 4 hidden."""
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    inputs = [
        real(5, 3, 2),
        real(directions, 4 * gates, 2),
        real(directions, 4 * gates, 4),
        real(directions, 8 * gates),
        None if lengths is None else np.array(lengths, np.int32),
        real(directions, 3, 4),
    ]
    return Node(op_type, inputs, [FLOATS] * outputs, {"hidden_size": 4, **attributes}, free=(0, 1))


def resized(shape: Sequence[int], scales: Sequence[float] = (), sizes: Sequence[int] = (), **attributes: Any) -> Node:
    given = [np.array(scales, np.float32)] if scales else [None, np.array(sizes, np.int64)]
    free = range(2, len(shape))
    return Node("Resize", [real(*shape), None, *given], attributes=attributes, constants=(2, 3), free=free)


REGIONS = np.array([[1.2, 0.5, 6, 7], [-3, 2, 3.2, 11], [4, 4, 4.2, 4.1]], np.float32)
SIGNED = bytes_of(4, 3, 2, 2, kind=np.int8)
QUANTIZED = [np.float32(0.02), np.uint8(131)]
CASES = {
    "indices": pool(2, 3, 6, 7, kernel_shape=[2, 3], strides=[2, 1]),
    "indices, padded alike": pool(2, 3, 6, 7, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
    "indices, padded at one end": pool(2, 2, 6, 7, kernel_shape=[3, 3], pads=[0, 2, 1, 0], dilations=[1, 2]),
    "indices by column": pool(2, 3, 5, 6, kernel_shape=[2, 2], storage_order=1, pads=[1, 0, 0, 1]),
    "indices, symbolic sizes": pool(2, 3, 5, 6, free=(0, 2, 3), kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    "indices along time": pool(3, 2, 9, kernel_shape=[3], strides=[2], ceil_mode=1),
    "bytes": Node("MaxPool", [bytes_of(1, 2, 5, 5)], (TensorProto.UINT8,), {"kernel_shape": [2, 2]}),
    "means at one end": mean(2, 2, 6, 7, kernel_shape=[3, 3], pads=[0, 2, 1, 0]),
    "means with padding": mean(2, 2, 6, 7, kernel_shape=[3, 3], pads=[0, 2, 1, 0], count_include_pad=1),
    "means, dilated": mean(2, 2, 7, 7, kernel_shape=[2, 3], dilations=[2, 1], pads=[1, 1, 1, 1], ceil_mode=1),
    "means, symbolic sizes": mean(2, 2, 6, 7, free=(0, 2, 3), kernel_shape=[3, 2], auto_pad="SAME_UPPER"),
    "means with padding, symbolic sizes": mean(
        2, 2, 6, 7, free=(2, 3), kernel_shape=[3, 2], pads=[0, 1, 1, 0], count_include_pad=1
    ),
    "LSTM": layer("LSTM", 4, None, 3),
    "LSTM backwards, lengths": layer("LSTM", 4, [2, 5, 3], 2, direction="reverse"),
    "LSTM to its last state, lengths": layer("LSTM", 4, [2, 5, 3], 3, direction="bidirectional"),
    "GRU both ways, lengths": layer("GRU", 3, [4, 1, 5], 2, direction="bidirectional", linear_before_reset=1),
    "GRU that resets first": layer("GRU", 3, None, 2),
    "RNN": layer("RNN", 1, [5, 4, 2], 2, activations=["Relu"]),
    "Resize to scales": resized((1, 2, 4, 6), [1, 1, 2.5, 0.5], mode="linear"),
    "Resize to sizes": resized((1, 2, 4, 6), sizes=[1, 2, 7, 3], mode="linear"),
    "Resize to corners": resized(
        (1, 2, 4, 6), sizes=[1, 2, 7, 3], mode="linear", coordinate_transformation_mode="align_corners"
    ),
    "Resize by repeating": resized((1, 2, 4, 6), [1, 1, 2, 3]),
    "Resize to the nearest": resized(
        (1, 2, 4, 6), [1, 1, 1.5, 0.5], coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    ),
    "Resize with cubics": resized((1, 2, 4, 6), [1, 1, 1.5, 2], mode="cubic"),
    "LpPool": Node("LpPool", [real(2, 3, 6, 6)], attributes={"kernel_shape": [2, 3], "p": 3, "pads": [1, 0, 0, 1]}),
    "GlobalLpPool": Node("GlobalLpPool", [real(2, 3, 4, 4)], attributes={"p": 2}),
    "LRN": Node("LRN", [real(2, 6, 3, 3)], attributes={"size": 3, "alpha": 0.5, "bias": 1.5}),
    "MeanVarianceNormalization": Node("MeanVarianceNormalization", [real(2, 3, 4, 4)]),
    "Det": Node("Det", [real(3, 4, 4)]),
    "CenterCropPad": Node(
        "CenterCropPad", [real(5, 4, 8), np.array([8, 3])], attributes={"axes": [0, -1]}, constants=(1,), free=(0,)
    ),
    "CenterCropPad by an odd number": Node("CenterCropPad", [real(5, 4), np.array([2, 7])], constants=(1,)),
    "Col2Im": Node(
        "Col2Im",
        [real(2, 3 * 6, 20), np.array([5, 4]), np.array([2, 3])],
        attributes={"pads": [0, 1, 1, 1], "strides": [1, 1]},
        constants=(1, 2),
        reference=True,
    ),
    "MaxUnpool": Node(
        "MaxUnpool",
        [real(1, 1, 2, 2), np.array([[[[5, 7], [13, 15]]]])],
        attributes={"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    "MaxUnpool to a size": Node(
        "MaxUnpool",
        [real(1, 1, 2, 2), np.array([[[[6, 8], [16, 18]]]]), np.array([1, 1, 5, 5])],
        attributes={"kernel_shape": [2, 2], "strides": [2, 2]},
        constants=(2,),
    ),
    **{
        f"RoiAlign {mode} {form}": Node(
            "RoiAlign",
            [real(2, 3, 8, 9), REGIONS, np.array([0, 1, 1])],
            attributes={"mode": mode, "coordinate_transformation_mode": form, "sampling_ratio": 2, "output_height": 3,
                        "output_width": 2, "spatial_scale": 0.75},
        )
        for mode in ("avg", "max")
        for form in ("half_pixel", "output_half_pixel")
    },
    "MatMulInteger": Node(
        "MatMulInteger",
        [bytes_of(3, 4), bytes_of(4, 5, kind=np.int8), np.uint8(7), bytes_of(5, kind=np.int8)],
        (TensorProto.INT32,),
        reference=True,
    ),
    "ConvInteger": Node(
        "ConvInteger", [bytes_of(2, 3, 5, 5), bytes_of(4, 3, 2, 2), np.uint8(9), np.uint8(3)], (TensorProto.INT32,),
        {"pads": [1, 0, 0, 1], "strides": [2, 1]},
    ),
    "QLinearConv": Node(
        "QLinearConv",
        [bytes_of(2, 3, 5, 5), *QUANTIZED, SIGNED, 0.01 + RNG.random(4, np.float32) / 20, np.zeros(4, np.int8),
         np.float32(1.7), np.uint8(120), RNG.integers(-900, 900, 4, np.int32)],
        (TensorProto.UINT8,), {"pads": [1, 1, 1, 1]}, constants=range(1, 9),
    ),
    "QLinearMatMul": Node(
        "QLinearMatMul", [bytes_of(3, 4), *QUANTIZED, bytes_of(4, 5), *QUANTIZED, np.float32(0.9), np.uint8(100)],
        (TensorProto.UINT8,),
    ),
    "EyeLike": Node("EyeLike", [real(4, 3)], (TensorProto.INT64,), {"k": 1, "dtype": TensorProto.INT64}, free=(0,)),
    "HannWindow": Node("HannWindow", [np.int64(10)], constants=(0,), reference=True),
    "HammingWindow": Node("HammingWindow", [np.int64(9)], attributes={"periodic": 0}, constants=(0,), reference=True),
    "BlackmanWindow": Node("BlackmanWindow", [np.int64(8)], constants=(0,), reference=True),
    "DFT": Node("DFT", [real(2, 8, 1), None, np.int64(1)], constants=(2,)),
    "DFT, complex": Node("DFT", [real(2, 3, 8, 2), None, np.int64(-3)], constants=(2,)),
    "DFT, one-sided": Node("DFT", [real(2, 8, 1), None, np.int64(1)], attributes={"onesided": 1}, constants=(2,)),
    "DFT, inverse": Node("DFT", [real(2, 8, 2), None, np.int64(1)], attributes={"inverse": 1}, constants=(2,)),
    "STFT": Node("STFT", [real(2, 40, 1), np.int64(8), np.hanning(16).astype(np.float32)], constants=(1,)),
    "STFT, both sides": Node(
        "STFT", [real(2, 40, 1), np.int64(8), None, np.int64(16)], attributes={"onesided": 0}, constants=(1, 3)
    ),
    "AffineGrid": Node(
        "AffineGrid", [real(2, 2, 3), np.array([2, 1, 3, 4])], attributes={"align_corners": 1}, constants=(1,),
        reference=True,
    ),
    "DepthToSpace": Node("DepthToSpace", [real(2, 8, 2, 3)], attributes={"blocksize": 2, "mode": "CRD"}),
    **{
        f"GridSample {mode} {padding} {align}": grid(mode, padding, align)
        for mode, padding, align in [
            ("linear", "zeros", 0), ("linear", "reflection", 1), ("nearest", "border", 0), ("cubic", "zeros", 1)
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.sampled(every=6)
def test_values(case: Node) -> None:
    proto = case.proto()
    if case.reference:
        expected = ReferenceEvaluator(proto).run(None, case.fed())
    else:
        session = open_exact(proto.SerializeToString(), onnxruntime.SessionOptions())
        expected = session.run(None, case.fed())
    for port, array in zip(proto.graph.output, expected):  # their ranks, where ONNX infers none
        names = [f"{port.name}_{axis}" for axis in range(array.ndim)]
        port.CopyFrom(helper.make_tensor_value_info(port.name, port.type.tensor_type.elem_type, names))
    model = Model.from_proto(proto)
    module = TorchModule(model)
    given = case.fed()
    found = module(*[torch.from_numpy(given[port.name]) for port in model.inputs])
    for ours, theirs in zip(found if isinstance(found, tuple) else (found,), expected):
        assert ours.numpy().dtype == theirs.dtype
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5 if theirs.dtype.kind == "f" else 0)


def test_random_numbers_are_of_pytorchs_generator() -> None:
    like = Node("RandomNormalLike", [real(4, 3)], attributes={"mean": 2.0, "scale": 0.5})
    torch.manual_seed(0)
    drawn = TorchModule(Model.from_proto(like.proto()))(torch.zeros(4, 3))
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.randn(4, 3) * 0.5 + 2.0)
    uniform = Node("RandomUniform", [], attributes={"shape": [4000], "low": -1.0, "high": 3.0})
    numbers = TorchModule(Model.from_proto(uniform.proto()))()
    assert numbers.min() >= -1
    assert numbers.max() < 3
    assert 0.9 < numbers.mean() < 1.1
    chances = np.log(np.array([[1, 2, 1], [0.001, 1, 1000]], np.float32))
    classes = Node("Multinomial", [chances], (TensorProto.INT32,), {"sample_size": 2000})
    counts = TorchModule(Model.from_proto(classes.proto()))(torch.from_numpy(chances))
    assert counts.dtype == torch.int32
    assert 850 < (counts[0] == 1).sum() < 1150
    assert (counts[1] == 2).sum() > 1950


def test_bernoulli_draws_of_pytorchs_generator() -> None:
    case = Node("Bernoulli", [np.array([0.0, 1.0, 0.5] * 200, np.float32)])
    module, chances = TorchModule(Model.from_proto(case.proto())), torch.from_numpy(case.fed()["x0"])
    torch.manual_seed(0)
    drawn = module(chances)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.bernoulli(chances))
    assert 60 < drawn[2::3].sum() < 140


def test_a_zero_point_for_each_row() -> None:
    a, b, zero = bytes_of(3, 4), bytes_of(4, 5), bytes_of(3)
    module = TorchModule(Model.from_proto(Node("MatMulInteger", [a, b, zero], (TensorProto.INT32,)).proto()))
    expected = (a.astype(np.int64) - zero[:, None]) @ b.astype(np.int64)
    np.testing.assert_array_equal(module(*map(torch.from_numpy, (a, b, zero))).numpy(), expected)
