"""Times of a graph's operators on this machine, measured in a process of their own with a limit of time.

A graph may be anybody's: one that never ends, or takes all memory, then costs a page its times and nothing else.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from archipel.client.conditions.probes.space import Memory
from archipel.errors import ArchipelError, InsightError
from archipel.insight.feeding import make_feed
from archipel.insight.limits import cut
from archipel.insight.page_data import KernelRow, TimesData
from archipel.insight.subjects import OpenGraph
from archipel.library_errors import one_line

SECONDS = 60.0
MAX_ANSWER_BYTES = 64 << 20
MAX_KERNELS = 20_000


class Kernel(msgspec.Struct, kw_only=True):
    """A row of what the process found."""

    node: str
    op_type: str
    calls: float
    us: float
    share: float


class Measured(msgspec.Struct, kw_only=True):
    """What the process found, or why it found nothing."""

    kernels: list[Kernel] = []
    wall_us: float = 0.0
    error: str = ""


def measure_times(
    graph: OpenGraph,
    batch: int = 1,
    runs: int = 20,
    threads: int = 1,
    examples: Mapping[str, np.ndarray] | None = None,
    seconds: float = SECONDS,
) -> None:
    """Put the times of a graph into its data, or the reason why there are none into its notes.

    Arguments:
        graph: as it was read.
        batch: what symbolic dimensions count as.
        runs: passes, of which medians are told.
        threads: threads inside one operator.
        examples: inputs by name, in place of random numbers.
        seconds: the process ends after them.

    Example:
        opened = read_onnx("model.onnx", batch=8)
        measure_times(opened.graphs[0], batch=8)
        Path("model.html").write_text(render(Page(title="model", version="1", subjects=[opened.subject])))
    """
    data = graph.data
    try:
        feed, assumed = make_feed(graph.model, graph.tensors, batch, examples)
        _check_memory(graph, feed)
        found = _ask(graph.file, feed, runs, threads, seconds)
        if found.error:
            raise InsightError(found.error)
    except (ArchipelError, ValueError) as error:
        data.notes.append(f"no times: {one_line(error)}")
        return
    by_name = {node.name: place for place, node in enumerate(data.nodes) if node.name}
    # A kernel for blocked channels has the name of the value that it makes.
    for value in data.values:
        by_name.setdefault(f"{value.name}_nchwc", value.producer)
    data.times = TimesData(
        runs=runs,
        threads=threads,
        wall_us=found.wall_us,
        kernels=[
            KernelRow(
                name=cut(row.node), op=cut(row.op_type), node=by_name.get(cut(row.node), -1), calls=row.calls,
                us=row.us,                share=row.share,
            )
            for row in found.kernels[:MAX_KERNELS]
        ],
        assumed=assumed,
        machine=f"{platform.system()} {platform.machine()}",
    )  # fmt: skip


def _check_memory(graph: OpenGraph, feed: Mapping[str, np.ndarray]) -> None:
    if graph.data.memory is None or sys.platform not in ("linux", "android"):
        return
    need = graph.data.memory.peak + graph.data.memory.weights + sum(array.nbytes for array in feed.values())
    free = int(Memory(1).value())
    if need > free:
        raise InsightError(f"a pass needs {need:,} bytes of memory, and {free:,} are free here; give a smaller --batch")


def _ask(file: Path, feed: Mapping[str, np.ndarray], runs: int, threads: int, seconds: float) -> Measured:
    with tempfile.TemporaryDirectory(prefix="archipel-insight-") as folder:
        for place, array in enumerate(feed.values()):
            np.save(Path(folder) / f"{place}.npy", array)
        request = {"file": str(file.resolve()), "folder": folder, "names": list(feed), "runs": runs, "threads": threads}
        command = [sys.executable, "-m", "archipel.insight.times_process"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                answer, _ = process.communicate(json.dumps(request).encode(), timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise InsightError(
                    f"{runs} passes took longer than {seconds:g} seconds; give fewer --passes, or a smaller --batch"
                ) from None
    if process.returncode or len(answer) > MAX_ANSWER_BYTES:
        raise InsightError(f"the process that measures ended with code {process.returncode}; give a smaller --batch")
    try:
        return msgspec.json.decode(answer, type=Measured)
    except msgspec.DecodeError as error:
        raise InsightError(f"the process that measures answered nonsense: {error}") from None
