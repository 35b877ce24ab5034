"""Federations over edge servers, in real processes, against the flat federation of the same devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tree import open_tree


def test_one_round_over_two_edges_is_that_of_all_their_devices(tmp_path: Path) -> None:
    with open_tree(tmp_path) as tree:
        tree.add("root", "sites")
        for edge, devices in (("edge-a", (1, 2)), ("edge-b", (3, 4, 5))):
            tree.add(edge, f"pupils-of-{edge}", "root", cohort=len(devices))
            for number in devices:
                tree.agent(edge, number)
        task = tree.task()
        tree.run(lambda: tree.state(task).state != "running")
        assert tree.state(task).state == "completed", tree.logs()
        made = tree.weights(task)
    flat = _flat(tmp_path / "flat", [1, 2, 3, 4, 5])
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
