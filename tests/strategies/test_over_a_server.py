"""Strategies with more than deltas over a real server: what is broadcast, what the server keeps, what devices keep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import Bundle, PrivacyPolicy, generate_key, pack
from archipel.cli.start.demo.fleet import POPULATION, Federation
from archipel.cli.start.local.processes import Processes
from archipel.client import Agent, AgentConfig
from archipel.operator import TaskRequest
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode
from tests.support.simulation import clients, simulate

ROUNDS, BITS = 3, 24
POLICY = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=10.0, max_bits=BITS, colluders=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["scaffold", "fednova", "ditto"])
def test_secure_rounds_come_out_like_simulated_ones(make: Callable[..., Bundle], tmp_path: Path, strategy: str) -> None:
    key = generate_key()
    # A batch holds all examples, so that their order, which devices draw by themselves, does not matter.
    bundle = make(
        strategy, key=key, batch_size=32, privacy=POLICY, strategy_options={"clip": 5.0, "bits": BITS}
    )  # fmt: skip
    pack(bundle.folder, tmp_path / "model.bundle")
    processes = Processes(tmp_path)
    try:
        federation = Federation(tmp_path, processes, key.public_key().public_bytes_raw())
        found = run(federation, tmp_path, bundle)
    finally:
        processes.close()
    expected = simulate(bundle, clients(), ROUNDS).parameters
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-4, err_msg=name)
        assert np.abs(value - bundle.parameters()[name]).max() > 0.02


def run(federation: Federation, folder: Path, bundle: Bundle) -> dict[str, np.ndarray]:
    """All rounds with all four clients; the last version's parameters."""
    field = bundle.program("predict").inputs[0].name
    stop = threading.Event()

    def device(index: int) -> None:
        x, y = clients()[index]
        config = AgentConfig(folder=folder / "devices" / str(index), isolated=False)
        with Agent(config, examples=lambda: {field: x, "label": y}) as agent:
            agent.enrol(decode("token", federation.mint(), EnrolmentToken))
            agent.run_forever(stop)

    operator = federation.operator
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(device, index) for index in range(4)]
        info = operator.bundles.upload(folder / "model.bundle")
        task = operator.tasks.create(
            TaskRequest(
                name="small", population=POPULATION, bundle=info.digest, rounds=ROUNDS,
                min_cohort=4, cohort=4, threshold=3,
            )
        )  # fmt: skip
        deadline = time.monotonic() + 90
        while operator.tasks.get(task.task_id).state == "running" and time.monotonic() < deadline:
            if any(future.done() for future in running):
                break
            time.sleep(0.2)
        stop.set()
    for future in running:
        future.result()
    rounds = list(operator.tasks.rounds(task.task_id))
    assert [each.reason for each in rounds if each.weights_out is None] == []
    assert len(rounds) == ROUNDS
    return dict(operator.weights.read(rounds[-1].weights_out))
