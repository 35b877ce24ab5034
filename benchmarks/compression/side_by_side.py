"""int8 after training by archipel, by onnxruntime.quantization and by NNCF/OpenVINO: same model, same calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import openvino_peer
import plain_onnxruntime
from cells import Cells
from evaluation import Difference, accuracy, difference
from latency import BASE, THREADS, measured, runner
from lite_peers import PeerError
from made import Facts, compressed_facts, facts, float_facts, onnx_facts
from subjects import CALIBRATION, Subject

OURS = "archipel"
PEER = "NNCF in OpenVINO"
PEER_FLOAT = "OpenVINO, float"
LATENCY_GOAL = 0.75


@dataclass(frozen=True)
class Entry:
    """One engine's result. `correct`: see evaluation.py; latency by threads: microseconds, ratio to our float."""

    name: str
    correct: str
    nbytes: int
    zipped: int
    us: dict[int, float]
    ratio: dict[int, float]
    versions: str = ""


@dataclass(frozen=True)
class Verdict:
    """Ours against the others: `change` in accuracy to the best of them, `small` as it, `fast` against our float."""

    best: str
    change: Difference
    as_good: bool
    small: bool
    smallest: str
    smallest_met: bool
    fast: bool


@dataclass(frozen=True)
class Table:
    """One model's entries, the float one first; `missing` says why an engine is not there."""

    title: str
    count: int
    entries: tuple[Entry, ...]
    missing: tuple[str, ...]

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def rivals(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.name not in (BASE, OURS, PEER_FLOAT)]

    def verdict(self) -> Verdict:
        ours = self.entry(OURS)
        best = max(self.rivals, key=lambda entry: accuracy(entry.correct, self.count))
        smallest = min(self.rivals, key=lambda entry: entry.nbytes)
        change = difference([(best.correct, ours.correct)], self.count)
        return Verdict(
            best.name,
            change,
            change.high >= 0,
            ours.nbytes <= best.nbytes,
            smallest.name,
            ours.nbytes <= smallest.nbytes,
            ours.ratio[1] <= LATENCY_GOAL,
        )


def side_by_side(subject: Subject, cells: Cells, peers: Path, quick: bool) -> Table:
    """Make, measure, or read what was measured before. An engine that cannot take part is named with the reason."""
    made = {BASE: float_facts(subject, cells), OURS: compressed_facts(subject, "int8_ptq", cells)}
    missing = []
    for name, (key, make) in _others(subject, peers).items():
        try:
            made[name] = cells.get(f"{subject.title} {name}", {"model": subject.digest, **key}, make)
        except PeerError as error:
            missing.append(f"{name}: {error}")
    times: dict[int, dict[str, Any]] = {}
    for threads in THREADS:
        key = {"threads": threads, "quick": quick, "files": {name: cell["digest"] for name, cell in made.items()}}
        measure = partial(_latency, subject, made, peers, threads, quick)
        times[threads] = cells.get(f"{subject.title} side by side, {threads} threads", key, measure)["times"]
    entries = [
        Entry(
            name, cell["correct"], cell["bytes"], cell["zipped"],
            {threads: found[name]["us"] for threads, found in times.items()},
            {threads: found[name]["ratio"] for threads, found in times.items()}, cell.get("versions", ""),
        )
        for name, cell in made.items()
    ]  # fmt: skip
    return Table(subject.title, len(subject.test), tuple(entries), tuple(missing))


def _others(subject: Subject, peers: Path) -> dict[str, tuple[Mapping[str, Any], Callable[[], Facts]]]:
    found: dict[str, tuple[Mapping[str, Any], Callable[[], Facts]]] = {}
    for way, options in plain_onnxruntime.WAYS.items():
        key = {"options": str(options), "calibration": CALIBRATION}
        found[f"onnxruntime, {way}"] = key, partial(_plain, subject, way)
    found[PEER] = {"calibration": CALIBRATION}, partial(_nncf, subject, peers)
    found[PEER_FLOAT] = {}, partial(onnx_facts, subject, subject.plain)
    return found


def _plain(subject: Subject, way: str) -> Facts:
    target = subject.made / f"onnxruntime-{way.replace(',', '').replace(' ', '-')}.onnx"
    plain_onnxruntime.quantize(subject.plain, target, subject.calibration, way)
    return onnx_facts(subject, target)


def _nncf(subject: Subject, peers: Path) -> Facts:
    out = subject.made / "nncf"
    calibration = subject.array("calibration", subject.calibration)
    inputs = subject.array("test", subject.test.inputs)
    try:
        classes, versions = openvino_peer.quantize(peers, subject.plain, calibration, inputs, out)
    finally:
        inputs.unlink()
    found = facts(subject, [out.with_suffix(".xml"), out.with_suffix(".bin")], classes)
    return {**found, "versions": ", ".join(f"{name} {version}" for name, version in versions.items())}


def _latency(subject: Subject, made: Mapping[str, Facts], peers: Path, threads: int, quick: bool) -> dict[str, Any]:
    example = subject.test.inputs[:1]
    files = {name: subject.made / cell["files"][0] for name, cell in made.items()}
    theirs = {name: files.pop(name) for name in (PEER, PEER_FLOAT) if PEER in made}
    found = [runner(name, path, threads, example) for name, path in files.items() if name != PEER_FLOAT]
    with ExitStack() as stack:
        if theirs:
            given, log = subject.array("example", example), subject.made / "openvino.log"
            found += stack.enter_context(openvino_peer.runners(peers, theirs, given, threads, log))
        return measured(found, quick)
