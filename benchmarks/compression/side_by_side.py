"""int8 after training by archipel, onnxruntime.quantization and NNCF: same model, calibration and rule of choice.

Each tool is there as it is by default and in the way that the validation part chose of all of its own (ways.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import openvino_peer
from cells import Cells
from evaluation import Difference, accuracy, difference
from latency import BASE, THREADS, Latency, measured, runner
from lite_peers import PeerError
from made import Facts, float_facts, onnx_facts
from subjects import Subject
from verdict import Outcome, at_least, at_most
from ways import NNCF, OURS, TOOLS

PEER_FLOAT = "OpenVINO, float"
LATENCY_GOAL = 0.75


@dataclass(frozen=True)
class Entry:
    """One row. `tool` and `way` of ways.py, for float models "" and "". `correct`: see evaluation.py; `latency` by
    number of threads, to our float model; `chosen` and `default`: which of the tool's ways it is.
    """

    name: str
    tool: str
    correct: str
    nbytes: int
    zipped: int
    latency: dict[int, Latency]
    chosen: bool = False
    default: bool = False


@dataclass(frozen=True)
class Verdict:
    """Ours as chosen against the others: `change` in accuracy to the best of them on the test part, whether the zipped
    file is no larger than that one's and than the smallest, latency against our float model on one thread.
    """

    best: Entry
    change: Difference
    as_good: Outcome
    small: bool
    smallest: Entry
    smallest_met: bool
    fast: Outcome


@dataclass(frozen=True)
class Table:
    """One model's entries, the float one first; `missing` says why an engine is not there; `divergences` by tool and
    way, in thousandths of a nat on the validation part; `versions` of the peers.
    """

    title: str
    count: int
    entries: tuple[Entry, ...]
    missing: tuple[str, ...] = ()
    divergences: dict[str, dict[str, float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> Entry:
        return next(entry for entry in self.entries if entry.tool == OURS and entry.chosen)

    @property
    def rivals(self) -> list[Entry]:
        """Every row of another tool, by default or as chosen."""
        return [entry for entry in self.entries if entry.tool not in ("", OURS)]

    def verdict(self) -> Verdict | None:
        """None where no other tool is there."""
        if not self.rivals:
            return None
        ours = self.ours
        best = max(self.rivals, key=lambda entry: accuracy(entry.correct, self.count))
        smallest = min(self.rivals, key=lambda entry: entry.zipped)
        change = difference([(best.correct, ours.correct)], self.count)
        one = ours.latency[1]
        return Verdict(
            best,
            change,
            at_least(0.0, change.low, change.high),
            ours.zipped <= best.zipped,
            smallest,
            ours.zipped <= smallest.zipped,
            at_most(LATENCY_GOAL, one.low, one.high),
        )


@dataclass(frozen=True)
class Row:
    """An entry before its latency is measured."""

    name: str
    tool: str
    facts: Facts
    chosen: bool = False
    default: bool = False


@dataclass(frozen=True)
class Rows:
    """What was made for one model's table."""

    rows: list[Row]
    missing: list[str]
    divergences: dict[str, dict[str, float]]


def rows(subject: Subject, cells: Cells, peers: Path) -> Rows:
    """Everything but latency. An engine that cannot take part is named with the reason."""
    found = Rows([Row(f"float, {OURS}", "", float_facts(subject, cells))], [], {})
    for tool in TOOLS:
        try:
            way, found.divergences[tool.name] = tool.chosen(subject, peers, cells)
            for each in dict.fromkeys([tool.default, way]):
                default, chosen = each == tool.default, each == way
                how = "default and chosen" if default and chosen else "default" if default else "chosen"
                facts = tool(subject, peers, each, cells)
                found.rows.append(Row(f"{tool.name}, {how}: {each}", tool.name, facts, chosen, default))
        except PeerError as error:
            found.missing.append(f"{tool.name}: {error}")
    if NNCF in found.divergences:
        key = {"model": subject.digest}
        plain = cells.get(f"{subject.title} {PEER_FLOAT}", key, partial(onnx_facts, subject, subject.plain))
        found.rows.append(Row(PEER_FLOAT, "", plain))
    return found


def side_by_side(subject: Subject, made: Rows, times: Cells, peers: Path, quick: bool) -> Table:
    """The table, with latency: measured, or read where it was before."""
    files = {row.name: row.facts["digest"] for row in made.rows}
    latency: dict[int, dict[str, Any]] = {}
    for threads in THREADS:
        key = {"threads": threads, "quick": quick, "files": files}
        measure = partial(_latency, subject, made.rows, peers, threads, quick)
        latency[threads] = times.get(f"{subject.title} side by side, {threads} threads", key, measure)["times"]
    entries = [
        Entry(
            row.name, row.tool, row.facts["correct"], row.facts["bytes"], row.facts["zipped"],
            {threads: Latency.of(found[_timed_as(row)]) for threads, found in latency.items()}, row.chosen, row.default,
        )
        for row in made.rows
    ]  # fmt: skip
    versions = {name: text for row in made.rows for name, text in row.facts.get("versions", {}).items()}
    return Table(
        subject.title, len(subject.test), tuple(entries), tuple(made.missing), dict(made.divergences), versions
    )


def _timed_as(row: Row) -> str:
    """The float model that ratios are to is BASE wherever latency is measured."""
    return BASE if row.name == f"float, {OURS}" else row.name


def _latency(subject: Subject, made: list[Row], peers: Path, threads: int, quick: bool) -> dict[str, Any]:
    example = subject.test.inputs[:1]
    files: Mapping[str, Path] = {_timed_as(row): subject.made / row.facts["files"][0] for row in made}
    theirs = {_timed_as(row) for row in made if row.tool == NNCF or row.name == PEER_FLOAT}
    found = [runner(name, path, threads, example) for name, path in files.items() if name not in theirs]
    with ExitStack() as stack:
        if theirs:
            given, log = subject.array("example", example), subject.made / "openvino.log"
            models = {name: path for name, path in files.items() if name in theirs}
            found += stack.enter_context(openvino_peer.runners(peers, models, given, threads, log))
        return measured(found, quick)
