"""One example for a prediction whose time is taken: the device's first, as often as the graph takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import open_bundle
from archipel.lite_runtime.latency import first_example
from tests.support.text_bundles import Roles

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(("batch", "rows"), [("n", 1), ("2", 2)])
def test_the_first_example_fills_the_batch_and_what_is_missing_is_zero(
    make_bundle: Callable[..., Path], r: type[Roles], key: Ed25519PrivateKey, batch: str, rows: int
) -> None:
    text = f"predict (float[{batch}, 4] x, float[{batch}, 1] c) => (float[{batch}, 4] y) {{ y = Add(x, c) }}"
    folder = make_bundle({"predict": ("predict", text, {"x": r.example, "c": r.example, "y": r.output})}, {})
    bundle = open_bundle(folder, [key.public_key().public_bytes_raw()])
    made = first_example(bundle, {"x": X, "label": np.arange(3)})
    assert made.keys() == {"x", "c"}
    np.testing.assert_array_equal(made["x"], np.repeat(X[:1], rows, axis=0))
    np.testing.assert_array_equal(made["c"], np.zeros((rows, 1), np.float32))
