"""Rotated updates: the graph's rotation is SciPy's, rounding is unbiased, and few bits cost less than without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import scipy.linalg

import archipel
from archipel.bundle import Bundle
from archipel.bundle.roles import Rotation, Seed, State, Update
from archipel.errors import ConversionError, SimulationError
from archipel.graph import Builder
from archipel.permutations import draw_bits
from archipel.protocol.bounds import step
from archipel.protocol.noised.rotation import SIGNS, choose_block, draw_signs, rotate, unrotate
from archipel.protocol.vector import Layout
from archipel.simulation import System
from archipel.strategies.program import ProgramGraph
from archipel.strategies.update_compression.hashing import add_bits
from archipel.training import hashing
from tests.support.simulation import clients, dense

Make = Callable[..., Bundle]


def packed(bundle: Bundle) -> Update:
    ports = [port for port in bundle.program("finish").outputs if isinstance(port, Update) and port.carries]
    assert len(ports) == 1
    return ports[0]


@pytest.mark.parametrize(("size", "block"), [(5, 8), (300, 128), (256, 256)])
def test_the_rotation_is_that_of_hadamards_matrix(size: int, block: int) -> None:
    vector = np.random.default_rng(0).standard_normal(size)
    blocks = -(-size // block)
    padded = np.concatenate([vector, np.zeros(blocks * block - size)])
    signs = draw_signs(7, padded.size).reshape(blocks, block)
    rows = np.stack([padded[first::blocks] for first in range(blocks)])
    expected = (rows * signs) @ scipy.linalg.hadamard(block) / np.sqrt(block)
    found = rotate(vector, block, 7)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    how = Rotation(parameters=(), block=block)
    np.testing.assert_allclose(unrotate(expected, how, size, 7), vector, atol=1e-12)
    assert set(signs.ravel()) == {-1.0, 1.0}
    assert not np.array_equal(signs.ravel(), draw_signs(8, padded.size))


def test_blocks_are_large_and_pad_little() -> None:
    for size in (1, 2, 3, 100, 255, 300, 5_000, 61_706, 1_000_000):
        block = choose_block(size)
        padded = -(-size // block) * block
        assert block & (block - 1) == 0
        assert block <= 1 << 14
        assert padded < size + block
        assert padded <= 2 * size if size < 256 else padded <= size + max(size / 16, 255)
    assert choose_block(1_000_000) == 1 << 14


def test_the_hash_is_the_one_of_step_graphs() -> None:
    """In NumPy, in `finish`, in the operators of step graphs and in Python's integers."""
    seed, count, mask = 12345, 5, 2**32 - 1

    def mixed(x: int, b: int = 0) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) & mask
        x = (((x ^ x >> 15) ^ b) * 0x846CA68B) & mask
        return x ^ x >> 16

    keys = [mixed(mixed(seed) ^ (SIGNS + i)) for i in (0, 1)]
    expected = [mixed(i ^ keys[0], keys[1]) for i in range(count)]
    assert draw_bits(seed, SIGNS, count).tolist() == expected
    finish = ProgramGraph("finish", "any")
    given = finish.input(Seed(name="seed", dtype="uint32", shape=()))
    drawn = add_bits(finish, given, SIGNS, count, "drawn")
    finish.output(State(name=drawn, tensor=drawn, dtype="uint32", shape=(count,), lifetime="round"))
    step_graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="step")
    op = Builder(step_graph)
    base = hashing.mix(op, op.input("seed", ir.DataType.UINT32, []))
    one, other = (hashing.mix(op, op.BitwiseXor(base, np.uint32(SIGNS + i))) for i in (0, 1))
    op.name_output(hashing.bits(op, op.constant(np.arange(count, dtype=np.uint32)), (one, other)), "bits")
    for proto in (finish.build()[0], ir.to_proto(ir.Model(step_graph, ir_version=10))):
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        assert session.run(None, {"seed": np.array(seed, np.uint32)})[0].tolist() == expected


def start_and_end(bundle: Bundle, seed: int, scale: float = 0.02) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a device changed: most of it is common to all devices, and few elements are far larger than the others."""
    common, own = np.random.default_rng(99), np.random.default_rng(seed)
    start, end = bundle.parameters(), {}
    for name, array in start.items():
        # Student's t with 2 degrees of freedom has no variance.
        change = common.standard_t(2, array.shape) + 0.5 * own.standard_normal(array.shape)
        end[name] = (array + scale * change).astype(np.float32)
    return start, end


@cache
def opened(file: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def finished(bundle: Bundle, start: dict[str, Any], end: dict[str, Any], **values: Any) -> dict[str, np.ndarray]:
    program = bundle.program("finish")
    session = opened(str(bundle.folder / program.file))
    feeds: dict[str, np.ndarray] = {}
    for port in program.inputs:
        tensor = getattr(port, "tensor", "")
        role = type(port).__name__
        if role == "Start":
            feeds[port.name] = start[tensor]
        elif role == "Parameter":
            feeds[port.name] = end[tensor]
        elif role == "Count":
            feeds[port.name] = np.array(values.get("examples", 100), np.int64)
        elif role == "Seed":
            feeds[port.name] = np.array(values.get("seed", 0), np.uint32)
        else:
            feeds[port.name] = np.array(values.get(port.name, getattr(port, "default", 0.0)), np.float32)
    names = [port.name for port in program.outputs]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.sampled(every=3)
def test_the_graph_rotates_and_rounds_to_whole_steps_without_bias(make: Make) -> None:
    bundle = make("fedavg", strategy_options={"clip": 50.0, "bits": 4, "value_range": 0.7, "compress": "rotation"})
    port = packed(bundle)
    start, end = start_and_end(bundle, 1)
    change = np.concatenate([(end[name].astype(np.float64) - start[name]).ravel() for name in port.carries.parameters])
    block = int(port.shape[1])
    expected = rotate(change, block, 9)
    assert np.abs(expected).max() < port.range
    drawn = np.stack([finished(bundle, start, end, seed=seed, update_seed=9)[port.name] for seed in range(100)])
    whole = drawn / step(port)
    np.testing.assert_allclose(whole, np.rint(whole), atol=1e-5)
    assert set(np.unique(np.rint(whole))) <= set(range(-7, 8))
    # Each is one of the two steps around the number, and on average the number itself.
    assert np.abs(drawn - expected).max() < step(port) * (1 + 1e-5)
    deviation = step(port) / 2 / np.sqrt(100)
    assert np.abs(drawn.mean(axis=0) - expected).max() < 5 * deviation
    assert len(np.unique(drawn[:, 0, 0])) == 2


@pytest.mark.sampled(every=3)
def test_few_bits_lose_less_when_rotated(make: Make) -> None:
    """The error of the mean of 20 heavy-tailed updates, against plain rounding with the same bits."""
    errors: dict[tuple[str | None, int], float] = {}
    for compress in (None, "rotation"):
        for bits in (4, 8):
            options: dict[str, Any] = {"clip": 1.0, "bits": bits, "weighting": "uniform"}
            bundle = make("fedavg", dense_wide, shape=(40,), strategy_options={**options, "compress": compress})
            layout = Layout.of(bundle.program("finish"))
            modulus = layout.modulus_bits(20)
            total = np.zeros(layout.length, np.uint32)
            mean: dict[str, np.ndarray] = {}
            for device in range(20):
                start, end = start_and_end(bundle, device, 0.002)
                arrays = finished(bundle, start, end, seed=device, update_seed=3)
                uploads = {each.name: arrays[each.name] for each in layout.updates}
                total += layout.encode(uploads, modulus_bits=modulus, max_cohort=20)
                for name in start:
                    mean[name] = mean.get(name, 0.0) + (end[name].astype(np.float64) - start[name]) / 20
            decoded = layout.decode_sum(total & np.uint32(2**modulus - 1), cohort=20, modulus_bits=modulus)
            layout.check_sum(decoded, 20)
            found = archipel.strategies.update_compression.unpack_deltas(bundle.manifest, decoded, {"update_seed": 3.0})
            assert found.deltas.keys() == mean.keys()
            squares = sum(float(((found.deltas[name] / 20 - mean[name]) ** 2).sum()) for name in mean)
            errors[compress, bits] = np.sqrt(squares / sum(float((array**2).sum()) for array in mean.values()))
    assert errors["rotation", 4] < errors[None, 4] / 4
    assert errors["rotation", 8] < errors[None, 8] / 10


def dense_wide() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("strategy", ["fedavg", "fednova", "scaffold", "qfedavg", "fedexp", "feddyn"])
def test_rounds_with_many_bits_come_out_as_without_it(make: Make, strategy: str) -> None:
    given: dict[str, Any] = {"clip": 50.0, "bits": 24, **({"control_clip": 1000.0} if strategy == "scaffold" else {})}
    plain, rotated = (
        archipel.simulate(
            make(strategy, dense, strategy_options={**given, "compress": how}), clients(), rounds=3, client_axis=axis
        )
        for how, axis in ((None, "off"), ("rotation", "on"))
    )
    assert [row.failed for row in rotated.history] == ["", "", ""]
    for name, value in plain.parameters.items():
        np.testing.assert_allclose(rotated.parameters[name], value, atol=3e-4, err_msg=name)


def test_the_range_follows_the_clip_of_the_round(make: Make) -> None:
    bundle = make("fedavg", strategy_options={"clip": None, "bits": 6, "compress": "rotation"})
    port = packed(bundle)
    start, end = start_and_end(bundle, 1)
    clip = port.clip / 100
    arrays = finished(bundle, start, end, update_clip=clip)
    whole = arrays[port.name] / (step(port) / 100)
    np.testing.assert_allclose(whole, np.rint(whole), atol=1e-4)
    assert 3 < np.abs(whole).max() <= 31


def test_what_does_not_go_together_is_refused(make: Make) -> None:
    with pytest.raises(ConversionError, match="compress must be one of rotation, random_k, top_k, low_rank, is"):
        make("fedavg", strategy_options={"compress": "zip"})
    bundle = make("fedavg", strategy_options={"compress": "rotation"})
    with pytest.raises(SimulationError, match="leave the option compress out"):
        archipel.simulate(bundle, clients(), rounds=1, mode="asynchronous", system=System(), cohort=2)


@pytest.mark.sampled(every=3)
def test_the_clock_counts_the_bits_that_each_sum_needs(make: Make) -> None:
    """10 devices with 4 bits: sums of up to 70 in 8 bits; without it the weight makes every entry 16 bits wide."""
    bytes_up = {}
    for compress in (None, "rotation"):
        options = {"clip": 1.0, "bits": 4, "compress": compress}
        bundle = make("fedavg", dense_wide, shape=(40,), strategy_options=options, loss_range=None)
        x, y = np.zeros((200, 40), np.float32), np.zeros(200, np.int64)
        found = archipel.simulate(bundle, [(x, y)] * 10, rounds=1, system=System(), client_axis="off", masks=True)
        assert [row.failed for row in found.history] == [""]
        bytes_up[compress] = found.history[0].bytes_up
    port = packed(bundle)
    elements, padded = 40 * 60 + 60 + 60 * 3 + 3, int(port.shape[0]) * int(port.shape[1])
    # The sum of ten weights of 16 bits takes 20.
    assert bytes_up[None] - bytes_up["rotation"] == 10 * (2 * (elements + 1) - (padded + 3))
