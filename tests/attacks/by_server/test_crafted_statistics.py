"""An active server sends running statistics of BatchNormalization that no round has made.

They are weights like others to what a device predicts: with other statistics it answers anything. Devices take only
statistics that the signed ranges of the log's rounds lead to. What honest rounds make of them is first compared with
the moments of all the devices' examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy.orm import Session

from archipel.bundle import Bundle, PrivacyPolicy, pack, write_weights
from archipel.server.database.tables import Blob, Task
from archipel.server.rounds.reach import extend
from archipel.server.services import Services
from tests.attacks.by_server.test_crafted_weights import all_refuse, attacked, entries, rewrite, trained_twice
from tests.support.federation import Federation
from tests.support.fixtures.federation import federation as federation
from tests.support.fixtures.federation import server_host as server_host
from tests.support.fixtures.strategies import make as make
from tests.support.simulation import clients, normalized

POLICY = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=2.0, max_bits=24, colluders=0.0)
MEAN, VARIANCE = "norm.running_mean", "norm.running_var"
Arrays = Mapping[str, np.ndarray]


def pooled(weights: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance after a round of one step: PyTorch's running averages of each device, all examples together."""
    shares, means, variances = [], [], []
    for x, _ in clients()[:3]:
        made = x.astype(np.float64) @ weights["body.weight"].T.astype(np.float64) + weights["body.bias"]
        means.append(0.9 * weights[MEAN] + 0.1 * made.mean(0))
        variances.append(0.9 * weights[VARIANCE] + 0.1 * made.var(0, ddof=1))
        shares.append(len(x) / 40)
    mean, square = (np.average(each, axis=0, weights=shares) for each in (means, np.add(variances, np.square(means))))
    return mean, square - mean**2


@pytest.mark.sampled(every=8)
def test_devices_refuse_statistics_that_no_round_has_made(
    federation: Federation, make: Callable[..., Bundle], tmp_path: Path
) -> None:
    # A batch holds all examples, so that their order, which devices draw by themselves, does not matter.
    bundle = make(
        "fedavg", normalized, key=federation.publisher_key, privacy=POLICY, batch_size=32, epochs=1,
        strategy_options={"clip": 2.0},
    )  # fmt: skip
    federation.bundle_file = tmp_path / "normalized.bundle"
    pack(bundle.folder, federation.bundle_file)
    field = bundle.program("predict").inputs[0].name
    agents = [
        federation.agent(number, examples=lambda x=x, y=y: {field: x, "label": y})
        for number, (x, y) in enumerate(clients()[:3])
    ]
    task = trained_twice(federation, agents)
    rounds = sorted((each for each in federation.rounds(task) if each.weights_out), key=lambda each: each.number)
    for each in rounds:
        before, after = (federation.operator.weights.read(w) for w in (each.weights_in, each.weights_out))
        mean, variance = pooled(before)
        np.testing.assert_allclose(after[MEAN], mean, atol=2e-4)
        np.testing.assert_allclose(after[VARIANCE], variance, atol=5e-4)
        assert np.abs(after[MEAN] - before[MEAN]).max() > 0.02
    genuine = dict(federation.operator.weights.read(rounds[-1].weights_out))

    def craft(services: Services, session: Session, row: Task) -> None:
        # Ten times is the most of one round, from weights that these devices have trained with.
        data = write_weights({**genuine, VARIANCE: genuine[VARIANCE] * np.float32(15)})
        digest = services.blobs.put(data)
        session.merge(Blob(digest=digest, kind="weights", size=len(data), created=0.0))
        extend(session, row.population, row.task_id, digest)
        rewrite(services, session, entries(session)[-1], weights=digest)
        row.model = digest

    attacked(federation, task, craft)
    all_refuse(federation, task, dict.fromkeys(agents, f"running statistic {VARIANCE!r} is not finite, or farther"))
