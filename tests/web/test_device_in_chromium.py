"""Pages of another origin as devices of a real server, in rounds with Python agents."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import numpy as np

from archipel import bundle as b
from archipel.client import Agent
from archipel.lite_runtime import Runtime
from archipel.protocol.operator.tasks import TaskInfo
from archipel.protocol.sealed import public_bytes
from archipel.protocol.vector import Layout
from tests.support.federation import Federation, round_seed
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.device_page import Pages, Tab, device_page, pages
from tests.support.linear_bundle import W0, local_data

UPLOADED = ["assigned", "trained", "advertised", "shared", "masked", "uploaded"]
ROUND = [*UPLOADED, "confirmed", "unmasked", "committed"]


def finished(federation: Federation, task: TaskInfo) -> bool:
    return federation.operator.tasks.get(task.task_id).state != "running"


def expected(federation: Federation, task: TaskInfo, agents: list[tuple[Agent, int]], tabs: list[int]) -> np.ndarray:
    """What federated averaging in fixed point makes of the first round of these devices, without any mask.

    The tabs' data have four examples, one batch, so that no order of theirs matters."""
    runtime = Runtime(b.open_bundle(federation.folder / "linear", [public_bytes(federation.publisher_key)]))
    digest = federation.plan_digest(federation.rounds(task)[0].round_id)
    updates = [
        runtime.local_round(local_data(number), seed=round_seed(agent.config.folder, digest), parameters={"w": W0})
        for agent, number in agents
    ]
    for number in tabs:
        four = {name: array[:4] for name, array in local_data(number).items()}
        updates.append(runtime.local_round(four, seed=0, parameters={"w": W0}))
    layout = Layout.of(runtime.bundle.program("finish"))
    total = sum(layout.encode(update.arrays, modulus_bits=32, max_cohort=16) for update in updates)
    decoded = layout.decode_sum(np.asarray(total, np.uint32), cohort=len(updates), modulus_bits=32)
    assert decoded.weight is not None
    return W0 + decoded.deltas["w"] / decoded.weight


def test_secure_rounds_with_agents(pages: Pages) -> None:
    """Two rounds: the second begins with weights that the page finds in the server's log, and endorsed."""
    federation = pages.federation
    with pages.tab(3) as tab:
        assert tab.open(examples=4) == ""
        enrolled = tab.enrol()
        assert tab.enrol() == enrolled
        agents = [federation.agent(number) for number in range(3)]
        task = federation.task(rounds=2, min_cohort=4, cohort=4, threshold=3)
        tab.work()
        federation.run(agents, lambda: finished(federation, task))
        first, second = federation.rounds(task)
        assert [(each.phase, enrolled in each.survivors) for each in (first, second)] == [("committed", True)] * 2
        assert tab.names() == ["enrolled", *ROUND, *ROUND]
        report = tab.report()
        weights = federation.operator.weights.read(first.weights_out)["w"]
        np.testing.assert_allclose(weights, expected(federation, task, list(zip(agents, range(3))), [3]), atol=2e-6)
    assert (report["deviceId"], report["population"], report["epsilon"]) == (enrolled, "pupils", 0)
    assert [(each["roundId"], each["result"], each["cohort"]) for each in report["rounds"]] == [
        (each.round_id, "took_part", 4) for each in (first, second)
    ]
    assert {name: report["totals"][name] for name in ("rounds", "tookPart", "smallest")} == {
        "rounds": 2, "tookPart": 2, "smallest": 4,
    }  # fmt: skip
