"""What a federation over edge servers is compared with: the same devices at one server, and a sum without any."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from archipel.bundle import Bundle
from archipel.cli.start.demo import cloud
from archipel.cli.start.demo.fleet import Federation, vanish_plan
from archipel.cli.start.demo.last_round import average
from archipel.cli.start.demo.results import EdgeRow, TreeResults
from archipel.cli.start.demo.tree import TreeFederation
from archipel.cli.start.local.processes import Processes
from archipel.cli.start.local.rounds import ended_rounds
from archipel.errors import CommandError
from archipel.protocol.operator.tasks import RoundInfo
from archipel.protocol.policy import colluders_of

ROUNDS = 2
HOSTS = 4


@dataclass(frozen=True)
class Flat:
    """Bytes of bodies at the one server, and seconds, of each round."""

    bytes: list[int]
    seconds: list[float]


def run_flat(
    folder: Path,
    publisher: bytes,
    devices: Mapping[str, Mapping[str, np.ndarray]],
    published: cloud.Published,
    seed: int,
    lr: float,
) -> Flat:
    """Two rounds of these devices at one server, in which two devices vanish as well. All its processes end with it."""
    processes = Processes(folder)
    try:
        federation = Federation(folder / "one-server", processes, publisher, devices)
        names = list(federation.devices)
        federation.start_devices(HOSTS, vanish_plan(names, ROUNDS, seed))
        federation.wait_until_enrolled(lambda done: None)
        task = federation.create_task(
            published.file,
            rounds=ROUNDS,
            threshold=math.ceil(cloud.THRESHOLD * len(names)),
            min_cohort=cloud.MIN_COHORT + colluders_of(published.bundle.manifest.privacy, len(names)),
            lr=lr,
        )
        done = [info for info in ended_rounds(federation, task) if info.phase == "committed"]
        logs = federation.devices.values()
        moved = [
            sum(log.sent.get(info.round_id, 0) + log.received.get(info.round_id, 0) for log in logs) for info in done
        ]
        return Flat(moved, [_seconds(info) for info in done])
    finally:
        processes.close()


def compare(
    tree: TreeFederation, flat: Flat, bundle: Bundle, seen: Sequence[RoundInfo], final: dict[str, np.ndarray], lr: float
) -> TreeResults:
    """Put both side by side, and compute the tree's last round again. `final`: the parameters that it made."""
    committed = [info for info in seen if info.phase == "committed"]
    compared = min(ROUNDS, len(committed), len(flat.bytes))
    rows = []
    of_edges = [tree.own_rounds(info) for info in committed]
    moved = tree.root_bytes(seen)
    for name, edge in tree.edges.items():
        own = [each for rounds in of_edges for each in rounds[name] if each.survivors]
        took = statistics.median([_seconds(each) for each in own] or [0.0])
        rows.append(EdgeRow(name, len(edge.devices), len(own), took, moved[name]))
    last = committed[-1]
    if last.step_scale not in (None, 1.0):
        raise CommandError(f"round {last.number}: the server shortened its step, so it cannot be computed again")
    homes = {
        log.device_id: edge.layout.device(log.name) for edge in tree.edges.values() for log in edge.devices.values()
    }
    again = average(
        bundle,
        tree.operator.weights.read(last.weights_in),
        [homes[device] for device in last.survivors],
        last.round_id,
        {"lr": lr},
    )
    return TreeResults(
        edges=rows,
        compared=compared,
        root_bytes=sum(tree.root_bytes(committed[:compared]).values()) / compared,
        flat_bytes=sum(flat.bytes[:compared]) / compared,
        seconds=statistics.median(map(_seconds, committed[:compared])),
        flat_seconds=statistics.median(flat.seconds[:compared]),
        checked=last.number,
        checked_devices=len(last.survivors),
        equal=again.keys() == final.keys() and all(again[name].tobytes() == final[name].tobytes() for name in final),
    )


def _seconds(info: RoundInfo) -> float:
    return (info.ended or info.started) - info.started
