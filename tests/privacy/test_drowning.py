"""How long the noise on a round's mean is, and that each remedy of the hint is one."""

from __future__ import annotations

import math
import re
import sys

import msgspec
import numpy as np
import pytest

from archipel.privacy.central import draw_noise, settle
from archipel.privacy.drowning import MeanNoise, drowning_hint, mean_noise
from archipel.protocol.bounds import step
from archipel.protocol.noised.layout import NoisedLayout, padded_length
from archipel.protocol.noised.shares import choose_share
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from tests.privacy.test_central import layout

SIZE, CLIP, ROUNDS = 4001, 1.0, 20
CENTRAL = DifferentialPrivacy(mechanism="central", noise_multiplier=0.05, delta=1e-5)


def number(text: str, before: str) -> float:
    found = re.search(rf"([\d,.]+){before}", text)
    assert found is not None, text
    return float(found[1].replace(",", ""))


def test_the_norm_is_that_of_noise_that_was_drawn() -> None:
    of = layout(SIZE, bits=16)
    drawn = [np.linalg.norm(draw_noise(CENTRAL, of)) * step(of.updates[0]) / 40 for _ in range(5)]
    found = mean_noise(CENTRAL, of, devices=40, rounds=ROUNDS)
    assert found.norm == pytest.approx(np.mean(drawn), rel=0.03)
    assert (found.clip, found.elements, found.devices) == (CLIP, SIZE // 2 * 2 + SIZE % 2 + 1, 40)
    # Of continuous noise, as papers write it.
    assert found.norm == pytest.approx(0.05 * CLIP * math.sqrt(found.elements) / 40, rel=0.02)


def test_correlated_noise_counts_with_what_it_leaves_in_the_model() -> None:
    of = layout(SIZE, bits=16)
    settings = settle(
        DifferentialPrivacy(mechanism="correlated", noise_multiplier=0.05, separation=5, delta=1e-5), ROUNDS
    )
    past: list[np.ndarray] = []
    model, squares = np.zeros(SIZE // 2 * 2 + SIZE % 2 + 1), []
    for _ in range(ROUNDS):
        past = [draw_noise(settings, of, past), *past][: len(settings.coefficients) - 1]
        model = model + past[0] * step(of.updates[0]) / 40
        squares.append(float(model @ model))
    # Independent noise of norm s in each round has s^2 t after t rounds.
    equal = math.sqrt(np.mean(squares) / np.mean(np.arange(1, ROUNDS + 1)))
    assert mean_noise(settings, of, devices=40, rounds=ROUNDS).norm == pytest.approx(equal, rel=0.05)


def test_shares_of_devices_add_up() -> None:
    of, devices = layout(SIZE, bits=16), 6
    share = choose_share(2.0, padded_length(SIZE + 1), 4)
    noised = NoisedLayout.over(of, share, 3)
    zeros = {port.name: np.zeros(tuple(int(dim) for dim in port.shape), np.float32) for port in of.updates}
    total = np.zeros(noised.length, np.uint32)
    for _ in range(devices):
        total += noised.encode(zeros, modulus_bits=32, max_cohort=devices)
    # The sum in steps, before it is shortened to what devices can send.
    whole = noised.signed_sum(total, cohort=devices, modulus_bits=32).astype(np.float64) / share.steps * CLIP
    drawn = float(np.linalg.norm(whole)) / devices * math.sqrt((SIZE // 2 * 2 + SIZE % 2 + 1) / noised.length)
    settings = DifferentialPrivacy(mechanism="distributed", noise_multiplier=2.0, delta=1e-5)
    found = mean_noise(settings, noised, devices=devices, rounds=ROUNDS, share=share)
    assert found.norm == pytest.approx(drawn, rel=0.05)
    # Four devices' noise would have been enough.
    assert found.norm == pytest.approx(2.0 * math.sqrt(6 / 4) * CLIP * math.sqrt(found.elements) / devices, rel=0.05)


@pytest.mark.parametrize("mechanism", ["central", "correlated", "distributed"])
def test_each_remedy_is_one(mechanism: str) -> None:
    more = {"separation": 3} if mechanism == "correlated" else {}
    settings = settle(DifferentialPrivacy(mechanism=mechanism, epsilon=4.0, delta=1e-5, **more), ROUNDS)
    devices = 60

    def size(devices: int, settings: DifferentialPrivacy, elements: int = 4000) -> MeanNoise:
        of, share = layout(elements - 1, bits=16), None
        if mechanism == "distributed":
            # The fewest that a round accepts grow with the cohort.
            share = choose_share(settings.noise_multiplier or 0, padded_length(elements), devices // 2)
        return mean_noise(settings, of, devices=devices, rounds=ROUNDS, share=share)

    noise = size(devices, settings)
    assert noise.ratio > 1.5
    hint = drowning_hint(settings, noise, ROUNDS)
    assert f"norm of {noise.norm:.3g}, {noise.ratio:.2g} times the clip of 1," in hint
    assert ("hardly learn" in hint) == (noise.ratio > 4)
    enough = int(number(hint, " devices a round"))
    assert size(enough, settings).ratio == pytest.approx(1, rel=0.03)
    fewer = int(number(hint, " trained parameters"))
    assert size(devices, settings, fewer - fewer % 2).ratio == pytest.approx(1, rel=0.05)
    epsilon = re.search(r"an epsilon of ([\d.]+) in place of 4 \(noise_multiplier ([\d.]+) in place", hint)
    assert epsilon is not None, hint
    looser = settle(msgspec.structs.replace(settings, epsilon=float(epsilon[1]), noise_multiplier=None), ROUNDS)
    assert looser.noise_multiplier == pytest.approx(float(epsilon[2]), rel=0.02)
    assert size(devices, looser).ratio == pytest.approx(1, rel=0.05)
    assert drowning_hint(looser, MeanNoise(1.0, 1.0, 4000, devices), ROUNDS) == ""


def test_devices_that_add_all_noise_alone_need_the_square() -> None:
    settings = DifferentialPrivacy(mechanism="local", noise_multiplier=3.0, delta=1e-5)
    share = choose_share(3.0, padded_length(1000), 1)
    noise = mean_noise(settings, layout(999, bits=16), devices=1000, rounds=ROUNDS, share=share)
    assert noise.norm == pytest.approx(3.0 * math.sqrt(1000 / 1000), rel=0.05)
    enough = int(number(drowning_hint(settings, noise, ROUNDS), " devices a round"))
    assert mean_noise(
        settings, layout(999, bits=16), devices=enough, rounds=ROUNDS, share=share
    ).ratio == pytest.approx(1, rel=0.01)


def test_an_epsilon_that_protects_nothing_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = MeanNoise(norm=50.0, clip=1.0, elements=1000, devices=4)
    hint = drowning_hint(msgspec.structs.replace(CENTRAL, noise_multiplier=5.0), noise, ROUNDS)
    assert "epsilon" not in hint
    assert "noise_multiplier" not in hint
    assert "trained parameters" not in hint  # not one would be left
    assert "200 devices a round" in hint
    # Without dp-accounting nobody knows the epsilon of a multiplier that was given.
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    hint = drowning_hint(CENTRAL, MeanNoise(2.0, 1.0, 1000, 4), ROUNDS)
    assert hint.endswith("; noise_multiplier 0.025 in place of 0.05")
