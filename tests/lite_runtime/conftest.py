from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from tests.support.text_bundles import BundleMaker, Make, Roles


@pytest.fixture
def r() -> type[Roles]:
    return Roles


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return b.generate_key()


@pytest.fixture
def make_bundle(tmp_path: Path, key: Ed25519PrivateKey) -> BundleMaker:
    return BundleMaker(tmp_path, key)


@pytest.fixture
def of_two_programs(make_bundle: BundleMaker, key: Ed25519PrivateKey) -> Callable[[str, str, np.ndarray], b.Bundle]:
    """(predict, train, w): a bundle of two graphs with the parameter w; predict has x and w -> y, train -> w_new."""

    def open_made(predict: str, train: str, w: np.ndarray) -> b.Bundle:
        role = Roles.parameter("w")
        programs = {
            "predict": ("predict", predict, {"x": Roles.example, "w": role, "y": Roles.output}),
            "train": ("train", train, {"x": Roles.example, "w": role, "w_new": role}),
        }
        return b.open_bundle(make_bundle(programs, {"w": w}), [key.public_key().public_bytes_raw()])

    return open_made


@pytest.fixture
def make(make_bundle: BundleMaker) -> Make:
    return make_bundle.load
