"""A simulation whose devices' programs run on a GPU gives the model of ONNX Runtime's on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from archipel.bundle import Bundle
from archipel.simulation import simulate
from tests.support import simulation as reference
from tests.support.fixtures.strategies import make  # noqa: F401

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("axis", ["on", "off"])
@pytest.mark.parametrize(
    ("strategy", "module", "shape"),
    [("scaffold", reference.convolutional, (2, 4, 4)), ("ditto", reference.dense, (6,))],
)
def test_the_same_rounds(
    make: Callable[..., Bundle],  # noqa: F811
    strategy: str,
    module: Any,
    shape: tuple[int, ...],
    axis: str,
) -> None:
    bundle = make(strategy, module, shape, strategy_options={"clip": 50.0, "bits": 24})
    clients = [{"input": x, "label": y} for x, y in reference.clients(shape)]
    expected = simulate(bundle, clients, rounds=2, client_axis="off")
    found = simulate(bundle, clients, rounds=2, client_axis=axis, engine="torch:cuda")
    assert [row.devices for row in found.history] == [4, 4]
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[name], value, atol=1e-4, err_msg=name)
