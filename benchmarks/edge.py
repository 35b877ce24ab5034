"""A round over edge servers, against a round of the same devices at one server.

All servers are in processes of their own on this machine, all devices in this one; the devices compute almost nothing,
so a round is its messages. Both federations run one after the other, each with its devices alone.

| case | what |
|---|---|
| upstream MB | bytes of bodies between the root and its members in a round, both ways, with bundle and weights |
| s a round | from one version to the next, the median |
| MiB of an edge | the most that all processes of one edge server have at once; beside it that of the one server |
| CPU s of an edge | of the same processes, a round |

Memory is the sum of proportional set sizes (PSS, /proc/PID/smaps_rollup), so that a page that two share counts once.

One edge server alone is no case: the policy of a bundle asks for two sites in a sum at least.

With ten devices below an edge the upstream link carries a tenth of the flat federation's bytes at most; a round takes
longer, as the sites' rounds come before the one among them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import psutil
from agent_federation import PRIVACY, flat_bundle
from measure import Report, Row, arguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from archipel import bundle as b
from archipel.client import Agent, AgentConfig
from archipel.client.memory.journal import read_entries
from archipel.operator import TaskRequest
from tests.support.tree import PATIENT, QUICK, Tree

ENTRIES = 250_000
"""Of the model: 1 MB of float32."""
LONG = {**PATIENT, "assigning": 120.0, "advertising": 600.0}


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(options.json, ("flask", "gunicorn", "cryptography", "numpy"))
    for edges, devices in [(2, 4)] if options.quick else [(2, 10), (3, 10), (10, 10)]:
        rounds = 2 if options.quick else 5
        with tempfile.TemporaryDirectory(prefix="archipel-edge-") as folder:
            ours = measure(Path(folder) / "tree", edges, devices, rounds)
            peer = measure(Path(folder) / "flat", 0, edges * devices, rounds)
        case = f"{edges} edges of {devices} devices"
        for unit, one, other in zip(("upstream MB", "s a round", "MiB of an edge", "CPU s of an edge"), ours, peer):
            report.add([Row("edge", f"{case}, {unit}", one, other, "one server", one / other, unit)])


def measure(folder: Path, edges: int, devices: int, rounds: int) -> tuple[float, ...]:
    """Of a round over so many edges of so many devices each, or (0) at one server: megabytes and seconds; and the peak
    memory (MiB) and the CPU time a round (seconds) of the first edge server's processes, or of the one server's."""
    folder.mkdir()
    publisher = b.generate_key()
    sites = b.Aggregators(min_site_cohort=2, max_site_cohort=devices)
    file = flat_bundle(folder / "flat", ENTRIES, publisher, msgspec.structs.replace(PRIVACY, aggregators=sites))
    tree = Tree(folder, publisher, file)
    try:
        tree.add("root", "members")
        names = [f"edge-{place}" for place in range(edges)]
        for name in names:
            tree.add(name, f"devices-of-{name}", "root", cohort=devices)
        for number, name in enumerate(name for name in names or ["root"] for _ in range(devices)):
            config = AgentConfig(folder=folder / f"device-{number}", **QUICK)
            agent = Agent(config, examples=examples, on_event=tree.events.append)
            agent.enrol(tree.nodes[name].token())
            tree.agents.append(agent)
        members = edges or devices
        task = tree.root.operator.tasks.create(
            TaskRequest(
                name="edge",
                population="members",
                bundle=tree.root.operator.bundles.upload(file).digest,
                rounds=rounds,
                min_cohort=members,
                cohort=members,
                levels=int(edges > 0),
                deadlines=LONG,
            )
        )
        meter = Meter(tree.nodes[names[0] if names else "root"].server.process.pid)
        began = meter.cpu()
        tree.run(lambda: meter.look() and tree.state(task).state != "running", 900.0)
        worked = meter.cpu() - began
        assert tree.state(task).state == "completed", tree.logs()
        time.sleep(3.0)  # the last round is entered in every journal
        done = [each for each in tree.rounds(task) if each.phase == "committed"]
        ended = [each.ended or 0.0 for each in done]
        folders = [tree.nodes[name].folder / "upstream" for name in names]
        folders = folders or [agent.config.folder for agent in tree.agents]
        entries = [entry for each in folders for entry in read_entries(each / "rounds")]
        traffic = sum(entry.sent + entry.received for entry in entries) / len(done)
        seconds = statistics.median(later - earlier for earlier, later in pairwise(ended))
        return traffic / 1e6, seconds, meter.peak / (1 << 20), worked / len(done)
    finally:
        tree.close()


class Meter:
    """Memory and CPU time of a process and all below it."""

    def __init__(self, pid: int) -> None:
        self._top = psutil.Process(pid)
        self.peak = 0
        self._last = 0.0

    def look(self) -> bool:
        """Note the memory, once a second at most. Returns True."""
        if time.monotonic() - self._last >= 1.0:
            self._last = time.monotonic()
            self.peak = max(self.peak, sum(each.memory_full_info().pss for each in self._all()))
        return True

    def cpu(self) -> float:
        """Seconds, of users and system."""
        return sum(each.cpu_times().user + each.cpu_times().system for each in self._all())

    def _all(self) -> list[psutil.Process]:
        return [self._top, *self._top.children(recursive=True)]


def examples() -> dict[str, np.ndarray]:
    return {"x": np.zeros(4, np.float32)}


if __name__ == "__main__":
    main()
