"""Bundles that multiply by a number, and slots that one of them runs in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.lite_runtime.slots.model_slots import Slots
from tests.support.scaling import ScalingModels
from tests.support.text_bundles import BundleMaker


@pytest.fixture
def trusted(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


@pytest.fixture
def model(make_bundle: BundleMaker, tmp_path: Path) -> ScalingModels:
    return ScalingModels(make_bundle, tmp_path)


@pytest.fixture
def running(model: ScalingModels, trusted: list[bytes], tmp_path: Path) -> Iterator[Slots]:
    """Slots with "times 2" good and active in slot a."""
    with Slots(tmp_path / "slots", trusted, confirm_after=None) as slots:
        slots.install(model(2))
        slots.switch()
        slots.confirm()
        yield slots
