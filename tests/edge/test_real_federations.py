"""Federations over edge servers, in real processes, against the flat federation of the same devices."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import bundle as b
from archipel.client import Agent, AgentConfig
from archipel.client.memory.journal import read_entries
from archipel.lite_runtime import Runtime
from archipel.protocol.sealed import public_bytes
from archipel.protocol.vector import Layout
from tests.support.device_process import Device
from tests.support.federation import round_seed
from tests.support.linear_bundle import W0, local_data
from tests.support.tree import PATIENT, Tree, open_tree


@pytest.mark.slow
def test_two_rounds_over_two_edges_are_those_of_all_their_devices(tmp_path: Path) -> None:
    with open_tree(tmp_path) as tree:
        tree.add("root", "sites")
        for edge, devices in (("edge-a", (1, 2)), ("edge-b", (3, 4, 5))):
            tree.add(edge, f"pupils-of-{edge}", "root", cohort=len(devices))
            for number in devices:
                tree.agent(edge, number)
        task = tree.task(rounds=2)
        tree.run(lambda: tree.state(task).state != "running")
        assert tree.state(task).state == "completed", tree.logs()
        made = tree.weights(task)
    flat = _flat(tmp_path / "flat", [1, 2, 3, 4, 5], rounds=2)
    np.testing.assert_array_equal(made["w"], flat["w"])


def _flat(folder: Path, numbers: list[int], **task: Any) -> dict[str, np.ndarray]:
    """The weights that the same devices make at one server."""
    folder.mkdir()
    with open_tree(folder) as tree:
        tree.add("root", "pupils")
        for number in numbers:
            tree.agent("root", number)
        count = len(numbers)
        made = tree.task(levels=0, cohort=count, min_cohort=count, **task)
        tree.run(lambda: tree.state(made).state != "running")
        assert tree.state(made).state == "completed", tree.logs()
        return dict(tree.weights(made))


@pytest.mark.slow
def test_three_edges_and_thirty_agents_in_their_own_processes(tmp_path: Path) -> None:
    """The uplink of one edge is killed, with its coordinator, between its sum and its keys' phase or wherever it is.

    The model is the mean of all devices of the sites in it, with each device's own draws.
    """
    sites = b.Aggregators(min_site_cohort=6, max_site_cohort=10)
    with open_tree(tmp_path, aggregators=sites) as tree, ExitStack() as stack:
        tree.add("root", "sites")
        fleets: dict[str, list[Device]] = {}
        for place, name in enumerate(("north", "south", "west")):
            node = tree.add(name, f"pupils-{name}", "root", cohort=10)
            fleets[name] = []
            for number in range(10 * place, 10 * place + 10):
                device = Device(tmp_path, number)
                with Agent(AgentConfig(folder=device.folder), examples=dict) as agent:
                    agent.enrol(node.token())
                fleets[name].append(device)
                device.start()
                stack.callback(device.process.kill)
        task = tree.task(min_cohort=2, cohort=3, threshold=2, deadlines={**PATIENT, "advertising": 240.0})
        deadline = time.monotonic() + 400
        killed = False
        while (state := tree.state(task)).state == "running":
            assert time.monotonic() < deadline, tree.logs()
            if not killed and "the sum of" in (tree.nodes["west"].folder / "server.log").read_text():
                os.kill(tree.nodes["west"].server.children()["coordinator"], signal.SIGKILL)
                killed = True
            time.sleep(0.1)
        assert state.state == "completed", tree.logs()
        [above] = [each for each in tree.rounds(task) if each.phase == "committed"]
        assert len(above.survivors) in (2, 3)
        assert killed
        made = tree.weights(task)["w"]
        in_sum = [
            (number, folder, plan)
            for name in _sites_in(tree, above.survivors)
            for number, folder, plan in _survivors(tree, name, task.task_id, above.round_id, fleets[name])
        ]
        assert len(in_sum) >= 12
        np.testing.assert_array_equal(made, _averaged(tree, in_sum))
        for fleet in fleets.values():
            for device in fleet:
                device.stop()


def _survivors(tree: Tree, name: str, task_id: str, origin: str, fleet: list[Device]) -> list[tuple[int, Path, str]]:
    """Number, folder and plan of each device in the edge's sum for that round of the root."""
    found = []
    survivors = {each for info in tree.nodes[name].operator.tasks.rounds(task_id) for each in info.survivors}
    for device in fleet:
        [plan] = [entry.plan for entry in read_entries(device.folder / "rounds") if entry.origin == origin]
        if json.loads((device.folder / "device.json").read_text())["device_id"] in survivors:
            found.append((int(device.place.name.rpartition("-")[2]), device.folder, plan))
    return found


def _sites_in(tree: Tree, survivors: list[str]) -> list[str]:
    """The names of the edges with these ids at the root."""
    names = {}
    for name, node in tree.nodes.items():
        record = node.folder / "upstream" / "device.json"
        if record.exists():
            names[json.loads(record.read_text())["device_id"]] = name
    return [names[device] for device in survivors]


def _averaged(tree: Tree, devices: list[tuple[int, Path, str]]) -> np.ndarray:
    """Federated averaging in fixed point of what these devices trained with their own draws."""
    bundle = b.open_bundle(tree.folder / "linear", [public_bytes(tree.publisher)])
    layout = Layout.of(bundle.program("finish"))
    total = np.zeros(layout.length, np.int64)
    for number, folder, plan in devices:
        update = Runtime(bundle).local_round(
            local_data(number), seed=round_seed(folder, plan), parameters={"w": W0}
        )  # fmt: skip
        vector = layout.encode(update.arrays, modulus_bits=32, max_cohort=32).astype(np.int64)
        total += np.where(vector >= 1 << 31, vector - (1 << 32), vector)
    sum_ = layout.decode_sum((total & 0xFFFFFFFF).astype(np.uint32), cohort=len(devices), modulus_bits=32)
    assert sum_.weight is not None
    return (W0.astype(np.float64) + sum_.deltas["w"] / sum_.weight).astype(np.float32)
