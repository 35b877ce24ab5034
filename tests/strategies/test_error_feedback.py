"""Top-k and random-k with error feedback, against the papers' steps in PyTorch, and what does not go with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import archipel
from archipel.bundle import Bundle
from archipel.bundle.roles import Rotation, Update
from archipel.errors import ConversionError, SimulationError
from archipel.permutations import draw_bits
from archipel.protocol.noised.rotation import PLACES, draw_places, rotate
from archipel.protocol.plain import plain_size
from archipel.protocol.uploads import upload_layout
from archipel.simulation.draws import device_seed
from tests.support import simulation
from tests.support.simulation import clients, dense, descended, tensors

Make = Callable[..., Bundle]
ROUNDS, SHARE = 4, 0.4
"""So large that no step is three times as long as the usual one, and scaled down for that."""


def packed(bundle: Bundle) -> Update:
    (port,) = [each for each in bundle.program("finish").outputs if isinstance(each, Update) and each.carries]
    return port


def rounds(make: Make, compress: str, privacy: str = "plain", axis: str = "off", **options: Any) -> archipel.Result:
    given = {"clip": 50.0, "bits": 24, "share": SHARE, "compress": compress, "weight_cap": 40, **options}
    bundle = make("fedavg", dense, strategy_options=given)
    found = archipel.simulate(bundle, clients(), rounds=ROUNDS, privacy=privacy, client_axis=axis)
    assert [row.failed for row in found.history] == [""] * ROUNDS
    return found


def reference(select: Callable[[torch.Tensor, int], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Federated averaging in which device i sends select(e_i + w_i (end - start)), and keeps the rest as e_i."""
    monkeypatch.setattr(simulation, "round_seed", lambda number, client: device_seed(0, number + 1, client))
    module = dense()
    w = tensors(module)
    names, shapes = list(w), [value.shape for value in w.values()]
    sizes = [len(x) for x, _ in clients()]
    kept = [torch.zeros(sum(value.numel() for value in w.values()), dtype=torch.float64) for _ in sizes]
    for number in range(ROUNDS):
        sent = []
        for i, size in enumerate(sizes):
            end = descended(module, w, number, i)
            wanted = kept[i] + size / 40 * torch.cat([(end[name] - w[name]).reshape(-1) for name in names])
            part = select(wanted, number + 1)
            kept[i] = wanted - part
            sent.append(part)
        mean = torch.stack(sent).sum(0) / (sum(sizes) / 40)
        parts = mean.split([shape.numel() for shape in shapes])
        w = {n: w[n] + part.reshape(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
    return w


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("axis", ["off", "on"])
def test_top_k_sends_the_largest_and_keeps_the_rest(make: Make, monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    def select(wanted: torch.Tensor, number: int) -> torch.Tensor:
        places = wanted.abs().topk(round(SHARE * wanted.numel())).indices
        return torch.zeros_like(wanted).scatter(0, places, wanted[places])

    expected = reference(select, monkeypatch)
    found = rounds(make, "top_k", axis=axis)
    for name, value in expected.items():
        np.testing.assert_allclose(found.parameters[name], value.numpy(), atol=2e-5, err_msg=name)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("privacy", ["secure", "plain"])
def test_random_k_sends_places_that_all_devices_share(
    make: Make, monkeypatch: pytest.MonkeyPatch, privacy: str
) -> None:
    size = sum(value.numel() for value in tensors(dense()).values())
    bundle = make("fedavg", dense, strategy_options={"compress": "random_k", "share": SHARE})
    carries = packed(bundle).carries
    assert isinstance(carries, Rotation)
    assert (carries.taken, packed(bundle).shape) == (round(SHARE * size), (round(SHARE * size),))

    def select(wanted: torch.Tensor, number: int) -> torch.Tensor:
        # The projection onto the drawn rows of the rotation, as a matrix.
        matrix = np.stack([rotate(unit, carries.block, number).reshape(-1) for unit in np.eye(size)], axis=1)
        places = draw_places(number, matrix.shape[0], round(SHARE * size))
        rows = torch.tensor(matrix[places])
        return rows.T @ (rows @ wanted)

    expected = reference(select, monkeypatch)
    found = rounds(make, "random_k", privacy, axis="on" if privacy == "secure" else "off")
    for name, value in expected.items():
        np.testing.assert_allclose(found.parameters[name], value.numpy(), atol=1e-3, err_msg=name)


def test_places_differ_from_each_other_and_from_round_to_round() -> None:
    first, second = draw_places(1, 1000, 100), draw_places(2, 1000, 100)
    assert len(set(first.tolist())) == 100
    assert len(set(first.tolist()) & set(second.tolist())) < 40
    bits = draw_bits(1, PLACES, 1000)
    assert sorted(bits[first], reverse=True) == sorted(bits.tolist(), reverse=True)[:100]


def test_what_is_sent_keeps_to_the_clip_and_devices_say_so(make: Make) -> None:
    """What devices keep grows; with a clip below a tenth of an update each round sends a part of it."""
    found = rounds(make, "top_k", clip=0.05)
    assert [row.clipped for row in found.history] == [4] * ROUNDS
    for row in found.history:
        assert row.step <= 0.05 * (1 + 1e-3)


@pytest.mark.sampled(every=3)
def test_bytes_follow_the_share(make: Make) -> None:
    size = {}
    for compress, options in (
        (None, {}), ("top_k", {"share": 0.1}), ("random_k", {"share": 0.1, "bits": 8}), ("rotation", {"bits": 4}),
    ):  # fmt: skip
        given = {"clip": 1.0, "weighting": "uniform", "compress": compress, **options}
        bundle = make("fedavg", wide, (200,), strategy_options=given, loss_range=None)
        size[compress] = plain_size(upload_layout(bundle.manifest, "training"))
    elements = 200 * 50 + 50
    names = 500  # safetensors' header
    assert 4 * elements < size[None] < 4 * elements + names
    assert 8 * (elements // 10) < size["top_k"] < 8 * (elements // 10) + names
    assert elements // 10 < size["random_k"] < elements // 10 + names
    assert elements / 2 < size["rotation"] < elements / 2 * 1.07 + names


def wide() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(200, 50))


@pytest.mark.sampled(every=3)
def test_what_does_not_go_together_is_refused(make: Make) -> None:
    with pytest.raises(SimulationError, match="set privacy to 'plain'"):
        rounds(make, "top_k", privacy="secure")
    for strategy in ("scaffold", "fednova", "qfedavg", "feddyn", "fedexp"):
        with pytest.raises(ConversionError, match="sends a part of a change in a later round"):
            make(strategy, dense, strategy_options={"compress": "top_k"})
    for share in (0.0, 1.5, "much"):
        with pytest.raises(ConversionError, match="share must be a number above 0 and at most 1"):
            make("fedavg", dense, strategy_options={"compress": "top_k", "share": share})
