"""Weights in 8 and 4 bits, by hand in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.compression import Examples, WeightOnly
from archipel.errors import CompressionError
from archipel.graph import Model
from tests.support.quantized_network import Apply, Run, Stored


def rounded(rows: np.ndarray, bits: int, block: int | None) -> np.ndarray:
    """Each block of a row in steps of its largest magnitude over 127 or 7."""
    levels = 2 ** (bits - 1) - 1
    result = np.empty_like(rows)
    width = block or rows.shape[1]
    for start in range(0, rows.shape[1], width):
        part = rows[:, start : start + width]
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(levels)
        scale[scale == 0] = 1
        result[:, start : start + width] = np.clip(np.round(part / scale), -levels - 1, levels) * scale
    return result


@pytest.mark.parametrize(("bits", "block"), [(8, 32), (8, None), (4, 16), (4, 40), (4, None)])
@pytest.mark.sampled(every=6)
def test_dense_and_convolution(bits: int, block: int | None, apply: Apply, run: Run) -> None:
    """50 inputs: the last block is smaller. A convolution's block runs over channels and window."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(5, 8, 10), nn.Flatten(), nn.Linear(8 * 7, 4))
    with torch.no_grad():
        network[2].weight[1] = 0
    x = np.random.default_rng(0).standard_normal((3, 5, 16)).astype(np.float32)
    model = Model.from_torch(network, torch.from_numpy(x))
    found, facts = apply(model, WeightOnly(bits=bits, block_size=block, smallest=8))  # type: ignore[arg-type]
    assert len(facts["weights"]) == 2
    with torch.no_grad():
        for layer in (network[0], network[2]):
            matrix = layer.weight.numpy().reshape(len(layer.weight), -1)
            layer.weight.copy_(torch.from_numpy(rounded(matrix, bits, block).reshape(layer.weight.shape)))
        expected = network(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(found.deployed(), x), expected, atol=2e-5)
    np.testing.assert_allclose(run(found, x, optimized=False), expected, atol=2e-5)


@pytest.mark.sampled(every=3)
def test_transposed_and_matrix_products(apply: Apply, run: Run) -> None:
    """MatMul with the inputs first, and ConvTranspose, whose rows are its inputs."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.matrix = nn.Parameter(torch.randn(40, 12))
            self.up = nn.ConvTranspose1d(12, 6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up((x @ self.matrix).transpose(1, 2))

    network = Both()
    x = np.random.default_rng(0).standard_normal((3, 5, 40)).astype(np.float32)
    model = Model.from_torch(network, torch.from_numpy(x))
    found, _ = apply(model, WeightOnly(bits=4, block_size=16, smallest=8))
    with torch.no_grad():
        network.matrix.copy_(torch.from_numpy(rounded(network.matrix.numpy().T.copy(), 4, 16).T.copy()))
        rows = network.up.weight.numpy().reshape(12, -1)
        network.up.weight.copy_(torch.from_numpy(rounded(rows, 4, 16).reshape(12, 6, 4)))
        expected = network(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(found.deployed(), x), expected, atol=2e-5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.sampled(every=8)
def test_recurrent_weights_and_embeddings(kind: type[nn.RNNBase], apply: Apply, run: Run) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.cells = nn.Embedding(30, 48), kind(48, 8, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cells(self.words(x))[0]

    network = Reader()
    x = np.random.default_rng(0).integers(0, 30, (3, 6))
    model = Model.from_torch(network, torch.from_numpy(x))
    found, facts = apply(model, WeightOnly(bits=4, block_size=32, smallest=8))
    assert len(facts["weights"]) == 3
    with torch.no_grad():
        for tensor in network.parameters():
            if tensor.ndim == 2:
                matrix = tensor.numpy()
                tensor.copy_(torch.from_numpy(rounded(matrix, 4, 32)))
        expected = network(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(found.deployed(), x), expected, atol=1e-5)
    assert len(found.deployed().to_bytes()) < 0.6 * len(model.to_bytes())


def test_four_bits_take_four_bits(apply: Apply, run: Run, stored: Stored) -> None:
    network = nn.Linear(512, 128)
    model = Model.from_torch(network, torch.zeros(2, 512))
    deployed = apply(model, WeightOnly(bits=4, block_size=64))[0].deployed()
    found = stored(deployed)
    assert found["weight_quantized"].nbytes == 512 * 128 // 2
    assert found["weight_scale"].shape in ((128, 8), (8, 128))
    assert len(deployed.to_bytes()) < 512 * 128 // 2 + 4 * 128 * 8 + 4 * 128 + 4000


@pytest.mark.sampled(every=4)
def test_shares_lose_less(apply: Apply, run: Run) -> None:
    rng = np.random.default_rng(0)
    network = nn.Linear(512, 64, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.from_numpy(rng.standard_t(4, (64, 512))))
    model = Model.from_torch(network, torch.zeros(2, 512))
    x = rng.standard_normal((256, 512)).astype(np.float32)
    exact = run(model, x)
    errors = [
        np.square(run(apply(model, WeightOnly(bits=4, weights=weights))[0].deployed(), x) - exact).mean()
        for weights in ("max", "mse")
    ]
    assert errors[1] < 0.9 * errors[0]


def test_what_stays_in_float(network: Model, apply: Apply, stored: Stored) -> None:
    found, facts = apply(network, WeightOnly(smallest=100, exclude=("dense*",)))
    assert facts["weights"] == ["conv.weight"]
    kept = stored(found.deployed())
    assert kept["dense.weight"].dtype == np.float32
    with pytest.raises(CompressionError, match="no weight of 100000 elements"):
        apply(network, WeightOnly(smallest=100000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits is one of 8, 4, got 3"),
        ({"block_size": 0}, "block_size must be a whole number from 1, is 0"),
        ({"rounding": "up"}, "rounding is one of nearest, adaround"),
    ],
)
def test_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=f"WeightOnly: {message}"):
        WeightOnly(**fields)


def test_adaround_needs_calibration_data(network: Model, apply: Apply) -> None:
    with pytest.raises(CompressionError, match="WeightOnly needs calibration data"):
        apply(network, WeightOnly(rounding="adaround"))
    examples = Examples({"x": np.ones((4, 2, 8, 8), np.float32)})
    apply(network, WeightOnly(rounding="adaround", rounding_steps=2), examples)
