"""The main job over edge servers: `archipel demo --edges`."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from archipel.cli.start.demo.command import LEAST_DEVICES_OF_EDGE
from archipel.cli.start.demo.fleet import vanish_plan
from archipel.cli.start.demo.report import print_results, write_report
from archipel.cli.start.demo.story import Options, Story
from archipel.cli.start.demo.tree import places_of
from archipel.cli.start.local.processes import Processes
from archipel.datasets import DigitsByWriter

ROUNDS, DEVICES, EDGES = 2, 2 * LEAST_DEVICES_OF_EDGE + 1, 2


@pytest.mark.slow
def test_run_over_two_edge_servers(
    few_writers: DigitsByWriter, quiet: Progress, processes: Processes, tmp_path: Path
) -> None:
    results = Story(Options(ROUNDS, DEVICES, 0, EDGES), tmp_path, processes, quiet, few_writers).run()
    assert [row.phase for row in results.rounds] == ["committed"] * ROUNDS
    for row in results.rounds:
        # One of each edge server vanishes.
        assert len(row.survivors) == DEVICES - EDGES
        assert len(row.dropped) == EDGES
    tree = results.tree
    assert tree is not None
    assert [(edge.devices, edge.rounds) for edge in tree.edges] == [(9, ROUNDS), (8, ROUNDS)]
    assert (tree.compared, tree.checked, tree.checked_devices) == (ROUNDS, ROUNDS, DEVICES - EDGES)
    assert tree.equal
    # The root has two members in place of seventeen, and a member's cost in a small round is nearly constant.
    assert tree.root_bytes < 1.5 * tree.flat_bytes * EDGES / DEVICES
    # Of the masked sums alone: two bytes and more for each parameter, from each edge server.
    assert tree.root_bytes > 2 * results.parameters * EDGES

    write_report(results, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "the same, bit for bit" in page
    assert "edge-2" in page
    out = io.StringIO()
    print_results(results, Console(file=out, width=200))
    assert "the model is the same, bit for bit" in " ".join(out.getvalue().split())


def test_one_device_of_each_edge_server_vanishes_in_every_round() -> None:
    names = [f"d{index}" for index in range(26)]
    places = places_of(names, 3)
    assert sorted(np.bincount(list(places.values())).tolist()) == [8, 9, 9]
    plan = vanish_plan(names, 30, seed=1, places=places)
    for number in range(1, 31):
        assert sorted(places[name] for name, rounds in plan.items() if number in rounds) == [0, 1, 2]
    assert len({tuple(rounds) for rounds in plan.values()}) > 12
