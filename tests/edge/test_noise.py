"""Central noise at the root of a tree is that of a flat federation: over the same sum, in the same account."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.errors import RefusedError
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from tests.edge.test_rounds import uplink
from tests.support.edge_world import ComputedSite, open_edge_world

NOISE = DifferentialPrivacy(mechanism="central", noise_multiplier=0.001, delta=1e-5)


@pytest.mark.sampled(every=4)
def test_the_account_of_a_round_over_edges_is_that_of_a_flat_one(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, weighting="uniform") as world:
        for number in (1, 2):
            world.device(number)
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        uplink(world)
        task = world.task(min_cohort=3, differential_privacy=NOISE)
        with world.running():
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
        done = world.operator.tasks.get(task.task_id)
        assert done.state == "completed", done.reason
        assert done.privacy_spent is not None
        assert done.privacy_spent.releases == 1
        # One device moves the mean of seven by a clip of 2: the noise is a thousandth of that.
        exact = world.averaged([1, 2, 3, 4, 5, 6, 7])
        assert 0 < float(np.abs(world.weights(task) - exact).max()) < 0.01


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"differential_privacy": DifferentialPrivacy(mechanism="distributed", noise_multiplier=1.0, delta=1e-5)},
         "noise of the root"),
        ({"kind": "evaluation", "metrics": {"mse": 1.0}, "count_adoption": True}, "counted at each edge server"),
        ({"evaluate_every": 1, "metrics": {"mse": 1.0}, "min_contributors": 5}, "contributors 5 holds for each site"),
        ({"kind": "evaluation", "metrics": {"mse": 1.0}, "min_contributors": 5}, "contributors 5 holds for each site"),
        ({"privacy": "plain", "threshold": None}, "secure rounds only"),
        ({"mode": "asynchronous"}, "rounds that begin together"),
        ({"protocol": "neighbours", "threshold": None}, "a complete graph of sites"),
        ({"max_contributions": 2}, "a limit of sites"),
        ({"levels": 2}, "the policy allows 1"),
        ({"levels": 0, "site": 3}, "belongs to tasks among edge servers"),
        ({"site": 5}, "sites of up to 5 devices"),
    ],
)  # fmt: skip
@pytest.mark.sampled(every=6)
def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    with open_edge_world(tmp_path, modes=("secure", "plain")) as world, pytest.raises(RefusedError, match=why):
        world.task(**changes)
