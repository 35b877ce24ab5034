"""A secure round in memory: devices, their keys, and a server that only passes messages on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.protocol.messages import RoundPlan
from tests.support.rounds import Round, fixed, make_plan, signing_key


@pytest.fixture
def make_round() -> type[Round]:
    return Round


@pytest.fixture(name="make_plan")
def _make_plan() -> Callable[..., RoundPlan]:
    return make_plan


@pytest.fixture(name="fixed")
def _fixed() -> Callable[..., bytes]:
    return fixed


@pytest.fixture(name="signing_key")
def _signing_key() -> Callable[[str], Ed25519PrivateKey]:
    return signing_key
