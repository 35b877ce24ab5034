"""The rules against those of byzfl, which runs in an environment of its own: it needs torchvision."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from archipel.simulation.attacks import ATTACKS
from archipel.strategies.robust import MIXERS, RULES
from archipel.strategies.robust.rule import clipped_mean, norms
from tests.support.environments import other_python

HERE = Path(__file__).parent
CASES = ((11, 3, 40), (14, 4, 7), (5, 2, 200), (20, 1, 3))
"""Updates, f, coordinates."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rules_and_attacks_are_those_of_byzfl(case: tuple[int, int, int], tmp_path: Path) -> None:
    count, tolerated, columns = case
    rng = np.random.default_rng(count)
    updates = rng.normal(size=(count, columns)) + 0.5
    updates[:tolerated] *= 30.0
    order = rng.permutation(count)
    bound = float(np.median(norms(updates)))
    np.savez(tmp_path / "given.npz", updates=updates, order=order, tolerated=tolerated, bound=bound)
    command = [other_python("byzfl", "byzfl==0.0.11"), HERE / "byzfl_values.py", tmp_path]
    subprocess.run(command, check=True, env={})
    expected = np.load(tmp_path / "expected.npz")
    for name in ("median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-bounding"):
        found = RULES[name](updates, tolerated, {})[0]
        assert_allclose(found, expected[name], rtol=1e-6, atol=1e-8, err_msg=name)
    center = np.zeros(columns)
    for _ in range(3):
        center = center + clipped_mean(updates - center, bound)
    assert_allclose(center, expected["centered-clipping"], rtol=1e-9)
    for name in MIXERS:
        assert_allclose(MIXERS[name](updates, tolerated, order), expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    for name in ("sign-flip", "ipm", "alie", "mimic"):
        found = ATTACKS[name](updates, tolerated, generator=rng, rule=lambda rows: np.asarray(rows.mean(axis=0)))
        assert_allclose(found, np.tile(expected[name], (tolerated, 1)), rtol=1e-9, err_msg=name)
