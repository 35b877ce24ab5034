from __future__ import annotations

from pathlib import Path

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
def make(make_bundle: BundleMaker) -> Make:
    return make_bundle.load
