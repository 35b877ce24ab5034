"""`archipel model card`: what the server's account says of a version, in a card that `convert --card` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from archipel.bundle import ModelCard, format_card, parse_card
from archipel.cli.federation.version_card import make_card
from archipel.cli.input_output.card import card_lines
from archipel.privacy import Gaussian, spent_epsilon
from archipel.protocol.operator.registry import VersionDetail
from tests.cli.federation.test_registry import digits  # noqa: F401  (a fixture)
from tests.cli.federation.test_remote import served  # noqa: F401  (a fixture)
from tests.server.rounds.noisy import central, equal_weights, run_round
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.world import World


@pytest.fixture
def version(world: World, tmp_path: Path) -> VersionDetail:  # noqa: F811
    """A version that a round with noise made, after one without."""
    noisy = equal_weights(world, tmp_path / "equal")
    devices = noisy.add_devices(3)
    noisy.create_task(rounds=1, cohort=3)
    run_round(noisy, devices)
    task = noisy.create_task(differential_privacy=central(3.0), rounds=1, cohort=3)["task_id"]
    run_round(noisy, devices)
    assert noisy.operator("POST", "/v1/models", {"name": "hours", "population": "pupils"})[0] == 201
    assert noisy.operator("POST", "/v1/models/hours/versions", {"task_id": task})[0] == 201
    return msgspec.convert(noisy.operator("GET", "/v1/models/hours/versions/1")[1], VersionDetail)


@pytest.mark.sampled(every=6)
def test_a_version_has_a_card_with_epsilon_and_what_it_rests_on(version: VersionDetail) -> None:
    before = ModelCard(name="hours", description="Hours.", task="regression", licence="MIT")
    card = parse_card(format_card(make_card(version, before)))
    assert (card.name, card.licence) == ("hours", "MIT")
    [stated] = card.privacy
    assert stated.epsilon == pytest.approx(spent_epsilon([Gaussian(noise_multiplier=3.0)], 1e-5), rel=1e-12)
    assert (stated.delta, stated.releases, stated.accountant) == (1e-5, 1, "rdp")
    assert stated.unit.startswith("a device")
    assert stated.sampling.startswith("none assumed")
    assert "without noise" in stated.trust
    assert stated.covers.endswith("not 1 sums of other tasks of the model, which were released without noise")
    assert "the word of the server of population pupils" in stated.source
    assert "nobody can check" in stated.source
    # Made again it takes the place of the older statement.
    assert make_card(version, card) == card
    shown = "\n".join(card_lines(msgspec.to_builtins(card)))
    assert f"privacy: epsilon {stated.epsilon:.4g} at delta 1e-05 after 1 noisy sums" in shown
    assert "source: the word of the server" in shown


@pytest.mark.sampled(every=4)
def test_without_a_card_one_is_begun(version: VersionDetail) -> None:
    card = make_card(version, None)
    assert (card.name, card.task, len(card.privacy)) == ("hours", "not stated", 1)


@pytest.mark.sampled(every=4)
def test_nothing_is_written_of_a_version_without_noise(
    archipel: Callable[..., tuple[str, str]],
    digits: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    _, error = archipel("model", "card", "digits", "1", str(tmp_path / "card.toml"), code=1)
    assert "version 1 of model 'digits' has no differential privacy that its server states" in error
    assert not (tmp_path / "card.toml").exists()
