"""Versions side by side: what was measured, size, work and memory, and what their cards say."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipel.bundle.card import CardMetric, ModelCard
from tests.support.fixtures.insight import publish
from tests.support.fleet import MODEL, Fleet
from tests.support.tiny_bundle import make_bundle
from tests.support.visitors import Visitor
from tests.support.world import World


def card(accuracy: float, milliseconds: float, limits: str) -> ModelCard:
    return ModelCard(
        name=MODEL, description="Digits.", task="image classification", intended_use="Reading meters.", limits=limits,
        metrics=(
            CardMetric(name="accuracy", value=accuracy, data="MNIST test", examples=10_000),
            CardMetric(name="milliseconds", value=milliseconds, data="a Raspberry Pi 4", examples=1),
        ),
    )  # fmt: skip


def test_it_has_what_the_publishers_state(world: World, tmp_path: Path) -> None:
    cards = [card(0.91, 3.5, "Letters are taken for digits."), card(0.93, 2.25, "None known.")]
    bundles = [
        publish(world, make_bundle(tmp_path / str(number), world.keys.publisher, name=f"v{number}", card=each))
        for number, each in enumerate(cards)
    ]
    fleet = Fleet(world)
    fleet.post("models", {"name": MODEL, "population": "pupils"}, 201)
    for digest in bundles:
        fleet.post(f"models/{MODEL}/versions", {"bundle": digest}, 201)
    path = f"/dashboard/models/{MODEL}/compare?versions=1,2"
    words = Visitor(world, world.operator_token).words(path)
    for row in (
        "accuracy on MNIST test, by its card 0.91 0.93",
        "milliseconds on a Raspberry Pi 4, by its card 3.5 2.25",
        "FLOPs for one example 100 100",
        "Memory at the peak 1.0 MiB 1.0 MiB",
        "Intended use Reading meters. Reading meters.",
        "Limits Letters are taken for digits. None known.",
    ):
        assert row in words, row
    assert "Licence" not in words  # neither card has one


@pytest.mark.sampled(every=3)
def test_it_has_how_long_predictions_take_on_devices(world: World) -> None:
    """Each figure from the newest evaluation that has it: a later one of the accuracy does not hide the latency."""
    fleet = Fleet(world).create()
    gate = {"metric": "predict_ms", "range": 1000.0, "better": "lower", "max_loss": 5.0}
    rollout = fleet.begin(gate=gate)
    inside, _ = fleet.enrol(rollout, 3)
    shown = fleet.pass_stage(rollout, inside, 45.0, 20.0)
    assert shown["state"] == "rolled_back"
    assert "predict_ms is 45, of the promoted version 20: worse by 25, allowed is 5" in shown["reason"]
    fleet.post(f"models/{MODEL}/versions/2/restore")
    again = fleet.begin()
    fleet.pass_stage(again, fleet.enrol(again, 3)[0], 0.75, 0.5)
    path = f"/dashboard/models/{MODEL}/compare?versions=1,2"
    words = Visitor(world, world.operator_token).words(path)
    assert "predict_ms, on devices 20 45" in words
    assert "accuracy, on devices 0.5 0.75" in words
