"""Low-rank updates against their formula in PyTorch, the best approximation (SVD), and PowerSGD with as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import archipel
from archipel.bundle import Bundle
from archipel.bundle.carried import LEFT, RIGHT
from archipel.bundle.roles import Update
from archipel.errors import ConversionError, ProvenanceError
from archipel.simulation.draws import device_seed
from archipel.strategies.update_compression import check_bases, first_bases, next_bases
from archipel.strategies.update_compression.low_rank import SHARE, expand
from tests.support import simulation
from tests.support.simulation import clients, convolutional, dense, descended, tensors

Make = Callable[..., Bundle]
Matrix = np.ndarray
ROUNDS = 4


def orthonormal(rng: np.random.Generator, size: int, rank: int) -> Matrix:
    return np.linalg.qr(rng.standard_normal((size, rank)))[0]


def factors(matrix: Matrix, left: Matrix, right: Matrix) -> Matrix:
    return SHARE * np.concatenate([matrix @ right, matrix.T @ left])


def test_the_server_takes_what_lies_in_either_span() -> None:
    rng = np.random.default_rng(0)
    matrix, left, right = rng.standard_normal((9, 7)), orthonormal(rng, 9, 3), orthonormal(rng, 7, 3)
    expected = matrix - (np.eye(9) - left @ left.T) @ matrix @ (np.eye(7) - right @ right.T)
    np.testing.assert_allclose(expand(factors(matrix, left, right), left, right), expected, atol=1e-12)
    # It is at most as long as (left, right), whatever these are.
    for _ in range(20):
        anything = rng.standard_normal((16, 3))
        assert np.linalg.norm(expand(anything, left, right)) <= np.linalg.norm(anything / SHARE) + 1e-12


def power_sgd(matrix: Matrix, basis: Matrix) -> tuple[Matrix, Matrix]:
    """A step of PowerSGD's algorithm 1 with warm start, as torch's powerSGD_hook has it: P and Q are both summed."""
    p = torch.linalg.qr(torch.tensor(matrix @ basis))[0].numpy()
    q = matrix.T @ p
    return p @ q.T, q


def test_warm_starts_lead_to_the_best_approximation() -> None:
    """One exchange a round needs as many bytes as PowerSGD's two, and its error is not larger."""
    rng = np.random.default_rng(1)
    u, v = orthonormal(rng, 40, 20), orthonormal(rng, 30, 20)
    values = 2.0 ** -np.arange(20)
    matrix, rank = u @ np.diag(values) @ v.T, 4
    best = np.sqrt(np.square(values[rank:]).sum())
    left, right = orthonormal(rng, 40, rank), orthonormal(rng, 30, rank)
    q, ours, theirs = right, [], []
    for _ in range(8):
        sent = factors(matrix, left, right)
        ours.append(np.linalg.norm(matrix - expand(sent, left, right)))
        left, right = np.linalg.qr(sent[:40])[0], np.linalg.qr(sent[40:])[0]
        made, q = power_sgd(matrix, q)
        theirs.append(np.linalg.norm(matrix - made))
    assert ours[0] > 3 * best
    # Two sides of rank 4 hold more than one matrix of rank 4 does, so it can even be better than that.
    assert ours[-1] < best
    assert ours[-1] <= theirs[-1]


@pytest.mark.sampled(every=3)
def test_rounds_come_out_as_the_formula_says(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "round_seed", lambda number, client: device_seed(0, number + 1, client))
    options = {"clip": 50.0, "bits": 24, "compress": "low_rank", "compress_rank": 1, "weight_cap": 40}
    bundle = make("fedavg", dense, strategy_options=options)
    ports = [port for port in bundle.program("finish").outputs if isinstance(port, Update) and port.kind == "delta"]
    assert {port.name: port.shape for port in ports if port.carries} == {
        "body.weight.packed.update": (11, 1), "head.weight.packed.update": (8, 1),
    }  # fmt: skip
    bases = {name: torch.tensor(array).double() for name, array in first_bases(bundle.manifest).items()}
    module, sizes = dense(), [len(x) for x, _ in clients()]
    w = tensors(module)
    kept = [{name: torch.zeros_like(value) for name, value in w.items()} for _ in sizes]
    for number in range(ROUNDS):
        total = {name: torch.zeros_like(value) for name, value in w.items()}
        left_sums, right_sums = (dict.fromkeys(w, 0.0) for _ in range(2))
        for i, size in enumerate(sizes):
            end = descended(module, w, number, i)
            for name, value in w.items():
                wanted = kept[i][name] + size / 40 * (end[name] - value)
                part = wanted
                if value.ndim == 2:
                    left, right = bases[LEFT + name], bases[RIGHT + name]
                    outside = (torch.eye(len(left)) - left @ left.T).double() @ wanted
                    part = wanted - outside @ (torch.eye(len(right)) - right @ right.T).double()
                    left_sums[name] += wanted @ right
                    right_sums[name] += wanted.T @ left
                total[name] += part
                kept[i][name] = wanted - part
        w = {name: value + total[name] / (sum(sizes) / 40) for name, value in w.items()}
        for name, value in w.items():
            if value.ndim == 2:
                bases[LEFT + name] = torch.linalg.qr(left_sums[name])[0]
                bases[RIGHT + name] = torch.linalg.qr(right_sums[name])[0]
    for axis, privacy in (("off", "secure"), ("on", "plain")):
        found = archipel.simulate(bundle, clients(), rounds=ROUNDS, client_axis=axis, privacy=privacy)
        assert [row.failed for row in found.history] == [""] * ROUNDS
        for name, value in w.items():
            np.testing.assert_allclose(found.parameters[name], value.numpy(), atol=2e-4, err_msg=name)


@pytest.mark.sampled(every=3)
def test_convolutions_are_matrices_of_their_first_axis(make: Make) -> None:
    options = {"clip": 50.0, "compress": "low_rank", "compress_rank": 1}
    bundle = make("fedavg", convolutional, (2, 4, 4), strategy_options=options)
    shapes = {name: array.shape for name, array in first_bases(bundle.manifest).items()}
    assert shapes == {
        f"{LEFT}conv.weight": (4, 1), f"{RIGHT}conv.weight": (9, 1), f"{LEFT}head.weight": (3, 1),
        f"{RIGHT}head.weight": (64, 1),
    }  # fmt: skip
    found = archipel.simulate(bundle, clients((2, 4, 4)), rounds=2, client_axis="on")
    assert [row.failed for row in found.history] == [""] * 2


@pytest.mark.sampled(every=3)
def test_what_is_sent_keeps_to_the_clip(make: Make) -> None:
    options = {"clip": 0.05, "compress": "low_rank", "compress_rank": 1}
    found = archipel.simulate(make("fedavg", dense, strategy_options=options), clients(), rounds=3)
    assert [(row.failed, row.clipped) for row in found.history] == [("", 4)] * 3
    assert all(row.step <= 0.05 * np.sqrt(2) * 1.001 for row in found.history)


def test_a_device_checks_the_bases_that_it_gets(make: Make) -> None:
    bundle = make("fedavg", dense, strategy_options={"clip": 1.0, "compress": "low_rank", "compress_rank": 1})
    good = first_bases(bundle.manifest)
    check_bases(bundle.manifest, good)
    name = f"{LEFT}body.weight"
    basis = good[name]
    for changed, why in (
        (basis[:-1], r"expected float32\[5, 1\]"),
        (basis.astype(np.float64), "got float64"),
        (2 * basis, "are not orthonormal, their products are off by 3"),
        (np.full_like(basis, np.nan), "off by nan"),
    ):
        with pytest.raises(ProvenanceError, match=why):
            check_bases(bundle.manifest, {**good, name: changed})
    for wrong in ({}, {**good, "other": basis}):
        with pytest.raises(ProvenanceError, match="low-rank bases: expected"):
            check_bases(bundle.manifest, wrong)
    # Sums of nothing have bases, too.
    zeros = {p.tensor: np.zeros(p.shape) for p in bundle.program("finish").outputs if isinstance(p, Update)}
    check_bases(bundle.manifest, next_bases(bundle.manifest, zeros))


def test_what_does_not_go_together_is_refused(make: Make) -> None:
    with pytest.raises(ConversionError, match="sends a part of a change in a later round"):
        make("scaffold", dense, strategy_options={"compress": "low_rank"})
    given: Any = {"compress": "low_rank", "compress_rank": 0}
    with pytest.raises(ConversionError, match="compress_rank must be a whole number of 1 or more"):
        make("fedavg", dense, strategy_options=given)
