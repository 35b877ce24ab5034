"""int8 after training by archipel, by onnxruntime.quantization and by NNCF/OpenVINO: same model, same calibration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import numpy as np
import openvino_peer
import plain_onnxruntime
from cells import Cells, digest
from evaluation import accuracy, difference, predictions, right
from latency import BASE, QUICK_ROUNDS, ROUNDS, compared, runner
from lite_peers import PeerError
from recipe_files import recipe_text
from subjects import CALIBRATION, Subject, sizes

from archipel.compression import Examples, compress, parse_recipe

OURS = "archipel"
PEER = "NNCF in OpenVINO"
PEER_FLOAT = "OpenVINO, float"
THREADS = (1, 2)
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
    note: str = ""


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

    def verdict(self) -> dict[str, Any]:
        """Whether ours is as good as the best of the others, as small as the smallest, and fast enough."""
        ours = self.entry(OURS)
        best = max(self.rivals, key=lambda entry: accuracy(entry.correct, self.count))
        found = difference([(best.correct, ours.correct)], self.count)
        least = min(entry.nbytes for entry in self.rivals)
        return {
            "best": best.name, "difference": str(found), "as good": found.high >= 0, "least bytes": least,
            "as small": ours.nbytes <= least, "fast": ours.ratio[1] <= LATENCY_GOAL,
        }  # fmt: skip


def side_by_side(subject: Subject, cells: Cells, peers: Path, quick: bool) -> Table:
    """Make, measure, or read what was measured before. An engine that cannot take part is named with the reason."""
    made: dict[str, dict[str, Any]] = {}
    missing = []
    for name, (key, make) in _makers(subject, peers).items():
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
            {threads: found[name]["ratio"] for threads, found in times.items()}, cell.get("note", ""),
        )
        for name, cell in made.items()
    ]  # fmt: skip
    return Table(subject.title, len(subject.test), tuple(entries), tuple(missing))


def _makers(subject: Subject, peers: Path) -> dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    text = recipe_text("int8_ptq", subject.name)
    found: dict[str, Any] = {
        BASE: ({"way": "float"}, partial(_facts, subject, [subject.deployed])),
        OURS: ({"recipe": text}, partial(_ours, subject, text)),
    }
    for way, options in plain_onnxruntime.WAYS.items():
        key = {"way": f"onnxruntime {way}", "options": str(options)}
        found[f"onnxruntime, {way}"] = (key, partial(_plain, subject, way))
    found[PEER] = ({"way": "nncf", "calibration": CALIBRATION}, partial(_nncf, subject, peers))
    found[PEER_FLOAT] = ({"way": "openvino float"}, partial(_facts, subject, [subject.plain]))
    return found


def _facts(subject: Subject, files: list[Path], classes: np.ndarray | None = None, note: str = "") -> dict[str, Any]:
    nbytes, zipped = sizes(*files)
    test = subject.test
    if classes is None:
        classes = predictions(files[0], test.inputs)
    return {
        "files": [str(path) for path in files], "digest": digest(*(path.read_bytes() for path in files)),
        "bytes": nbytes, "zipped": zipped, "correct": right(classes, test), "note": note,
    }  # fmt: skip


def _ours(subject: Subject, text: str) -> dict[str, Any]:
    target = subject.made / f"int8_ptq-{digest(text)}.onnx"
    validation = Examples({subject.model.inputs[0].name: subject.splits.validation.inputs}, subject.splits.validation.labels)
    small, _ = compress(subject.model, parse_recipe(text), calibration=subject.calibration, validation=validation)
    small.save(target)
    return _facts(subject, [target])


def _plain(subject: Subject, way: str) -> dict[str, Any]:
    target = subject.made / f"onnxruntime-{way.replace(' ', '-').replace(',', '')}.onnx"
    plain_onnxruntime.quantize(subject.plain, target, subject.calibration, way)
    return _facts(subject, [target])


def _nncf(subject: Subject, peers: Path) -> dict[str, Any]:
    out = subject.made / "nncf"
    calibration = subject.array("calibration", subject.calibration)
    inputs = subject.array("test", subject.test.inputs)
    classes, versions = openvino_peer.quantize(peers, subject.plain, calibration, inputs, out)
    inputs.unlink()
    note = ", ".join(f"{name} {version}" for name, version in versions.items())
    return _facts(subject, [out.with_suffix(".xml"), out.with_suffix(".bin")], classes, note)


def _latency(subject: Subject, made: dict[str, Any], peers: Path, threads: int, quick: bool) -> dict[str, Any]:
    example = subject.test.inputs[:1]
    theirs = {name: Path(made[name]["files"][0]) for name in (PEER, PEER_FLOAT) if PEER in made and name in made}
    found = [
        runner(name, Path(cell["files"][0]), threads, example) for name, cell in made.items() if name not in theirs
    ]
    with ExitStack() as stack:
        if theirs:
            given, log = subject.array("example", example), subject.made / "openvino.log"
            found += stack.enter_context(openvino_peer.runners(peers, theirs, given, threads, log))
        return {"times": compared(found, QUICK_ROUNDS if quick else ROUNDS)}
