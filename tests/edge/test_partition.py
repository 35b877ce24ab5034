"""The link between an edge server and the cloud is gone for longer than a round, in real networks.

The root is in a network namespace, with one link for the edge server and one for the other sites. When a link is down
nobody is told: packets vanish, and connections that were open hang. A slow link that loses packets is made of the
kernel's token bucket and of its packet filter, as its network emulator (tc netem) is not in every kernel.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import bundle as b
from archipel.client import Agent, AgentConfig
from archipel.client.memory.journal import read_entries
from archipel.operator import TaskRequest
from archipel.protocol.sealed import encode, public_bytes
from tests.support.edge_world import TIMES, ComputedSite, averaged
from tests.support.namespaces import Network, ServerInside, open_network, why_not
from tests.support.tree import QUICK, Tree, make_node, open_tree

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


def lay(tree: Tree, network: Network) -> list[Agent]:
    """Root, edge and sites. Returns the devices of the edge."""
    own, others = network.add_link(), network.add_link()
    root = tree.nodes["root"] = make_node(tree.folder, "root", tree.publisher, "sites")
    root.server = ServerInside(root.server, network)
    root.start()
    port = root.server.url.rpartition(":")[2]
    edge = tree.nodes["edge"] = make_node(
        tree.folder, "edge", tree.publisher, "pupils", below=root, cohort=2, extra="allow_http = true\n"
    )  # fmt: skip
    token = root.token("aggregator", server=f"http://{own.there}:{port}")
    (edge.folder / "upstream.token").write_bytes(encode(token))
    edge.start()
    devices = [tree.agent("edge", number) for number in (1, 2)]
    for name, numbers in (("b", [3, 4, 5]), ("c", [6, 7])):
        config = AgentConfig(folder=tree.folder / f"site-{name}", allow_http=True, **QUICK)
        site = Agent(config, examples=dict, on_event=tree.events.append, site=ComputedSite(numbers))
        site.enrol(root.token("aggregator", server=f"http://{others.there}:{port}"))
        tree.agents.append(site)
    # The operator is where the others are.
    root.server.url = f"http://{others.there}:{port}"
    return devices


def states(tree: Tree, task_id: str) -> list[str]:
    """The phases of the edge's own rounds for that task."""
    known = [task.task_id for task in tree.nodes["edge"].operator.tasks.list()]
    return [each.phase for each in tree.nodes["edge"].operator.tasks.rounds(task_id)] if task_id in known else []


def test_the_edge_serves_its_devices_meanwhile_and_catches_up_once(tmp_path: Path) -> None:
    with open_network() as network, open_tree(tmp_path) as tree:
        devices = lay(tree, network)
        link = network.links[0]
        times: dict[str, Any] = {**TIMES, "advertising": 20.0}
        task = tree.task(cohort=3, min_cohort=3, threshold=2, deadlines=times)
        found: dict[str, Any] = {}

        def step() -> bool:
            """What happens next; the agents work meanwhile."""
            if "cut" not in found:
                if "aggregating" in states(tree, task.task_id) or "masking" in states(tree, task.task_id):
                    link.cut()
                    found["cut"] = tree.rounds(task)[-1].round_id
                return False
            if "own" not in found:
                # The root has given the round up, which the edge cannot know.
                if next(each for each in tree.rounds(task) if each.round_id == found["cut"]).phase != "failed":
                    return False
                weights = tree.nodes["edge"].operator.tasks.get(task.task_id).model
                found["own"] = tree.nodes["edge"].operator.tasks.create(
                    TaskRequest(
                        name="look", population="pupils", bundle=task.bundle, rounds=1, min_cohort=2, cohort=2,
                        threshold=2, kind="evaluation", metrics={"mse": 256.0}, max_examples=100, deadlines=TIMES,
                        weights=weights,
                    )
                )  # fmt: skip
                return False
            if "mended" not in found:
                if tree.nodes["edge"].operator.tasks.get(found["own"].task_id).state == "running":
                    return False
                link.mend()
                found["mended"] = True
            return tree.state(task).state != "running" and tree.nodes["edge"].operator.tasks.get(
                task.task_id
            ).state != "running"  # fmt: skip

        tree.run(step, 180.0)
        assert tree.state(task).state == "completed", tree.logs()
        assert tree.nodes["edge"].operator.tasks.get(found["own"].task_id).state == "completed"
        *before, last = tree.rounds(task)
        assert {each.phase for each in before} == {"failed"}
        assert (last.phase, len(last.survivors)) == ("committed", 3)
        # Each device is in the model once, and knows of that one time.
        bundle = b.open_bundle(tree.folder / "linear", [public_bytes(tree.publisher)])
        np.testing.assert_array_equal(tree.weights(task)["w"], averaged(bundle, [1, 2, 3, 4, 5, 6, 7]))
        own = tree.nodes["edge"].operator.tasks
        assert own.get(task.task_id).state == "completed"
        assert states(tree, task.task_id).count("committed") == 1
        for agent in devices:
            trained = [entry for entry in agent.rounds if entry.kind == "training"]
            assert [entry.result for entry in trained].count("took_part") == 1
            assert [entry.origin for entry in trained if entry.result == "took_part"] == [last.round_id]
            assert "evaluation" in {entry.kind for entry in agent.rounds}
        counted = read_entries(tree.nodes["edge"].folder / "upstream" / "rounds")
        assert [entry.round_id for entry in counted if entry.result == "took_part"] == [last.round_id]


@pytest.mark.skipif(not (shutil.which("tc") and shutil.which("iptables")), reason="needs the programs tc and iptables")
def test_a_link_of_1_mbit_a_second_that_loses_two_packets_of_a_hundred(tmp_path: Path) -> None:
    with open_network() as network, open_tree(tmp_path) as tree:
        devices = lay(tree, network)
        network.slow_down(1.0, 0.02)
        task = tree.task(rounds=2, cohort=3, min_cohort=3, threshold=2, deadlines={**TIMES, "advertising": 60.0})
        edge = tree.nodes["edge"].operator.tasks
        tree.run(lambda: tree.state(task).state != "running" and edge.get(task.task_id).state != "running", 180.0)
        assert tree.state(task).state == "completed", tree.logs()
        assert [each.phase for each in tree.rounds(task)] == ["committed"] * 2
        for agent in devices:
            assert [entry.result for entry in agent.rounds] == ["took_part"] * 2
