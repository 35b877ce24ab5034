"""int8 after training in every way that a tool offers; which way is used is chosen by the validation part.

One rule for all tools: the way whose answers to the validation examples are closest to the float model's, by the mean
Kullback-Leibler divergence. Labels are not used for it, test examples are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import openvino_peer
import plain_onnxruntime
from cells import Cells
from evaluation import divergence, logits
from made import Facts, facts, onnx_facts
from subjects import CALIBRATION, Subject

from archipel.compression import StaticInt8, compress

OURS = "archipel"
PLAIN = "onnxruntime"
NNCF = "NNCF in OpenVINO"
_OURS: dict[str, dict[str, Any]] = {
    f"{calibration}, {rounding}": {"calibration": calibration, "rounding": rounding}
    for calibration, rounding in product(("minmax", "percentile", "mse"), ("nearest", "adaround"))
}


@dataclass(frozen=True)
class Tool:
    """`ways` by name, the tool's own defaults first; `make` quantizes a subject in one way, tests and measures it."""

    name: str
    ways: dict[str, dict[str, Any]]
    make: Callable[[Subject, Path, str, dict[str, Any]], Facts]

    @property
    def default(self) -> str:
        return next(iter(self.ways))

    def __call__(self, subject: Subject, peers: Path, way: str, cells: Cells) -> Facts:
        """As `made.facts`, with `divergence` in thousandths of a nat. Raises PeerError."""
        key = {"model": subject.digest, "options": self.ways[way], "calibration": CALIBRATION}
        return cells.get(f"{subject.title} {self.name} {way}", key, partial(self._made, subject, peers, way))

    def chosen(self, subject: Subject, peers: Path, cells: Cells) -> tuple[str, dict[str, float]]:
        """The way for this model, and the divergence of each. Raises PeerError."""
        found = {way: float(self(subject, peers, way, cells)["divergence"]) for way in self.ways}
        return min(found, key=lambda way: found[way]), found

    def _made(self, subject: Subject, peers: Path, way: str) -> Facts:
        return self.make(subject, peers, way, self.ways[way])


def _ours(subject: Subject, _peers: Path, way: str, options: dict[str, Any]) -> Facts:
    small, _ = compress(subject.model, [StaticInt8(**options)], calibration=subject.calibration, seed=subject.seed)
    path = subject.made / f"{OURS} {way}.onnx"
    small.save(path)
    return _onnx(subject, path)


def _plain(subject: Subject, _peers: Path, way: str, options: dict[str, Any]) -> Facts:
    path = subject.made / f"{PLAIN} {way}.onnx"
    plain_onnxruntime.quantize(subject.plain, path, subject.calibration, options)
    return _onnx(subject, path)


def _onnx(subject: Subject, path: Path) -> Facts:
    return {**onnx_facts(subject, path), "divergence": _divergence(subject, logits(path, _validation(subject)))}


def _nncf(subject: Subject, peers: Path, way: str, options: dict[str, Any]) -> Facts:
    out, validation = subject.made / f"nncf {way}", _validation(subject)
    calibration = subject.array("calibration", subject.calibration)
    inputs = subject.array("asked", np.concatenate([validation, subject.test.inputs]))
    try:
        answers, versions = openvino_peer.quantize(peers, subject.plain, calibration, inputs, out, options)
    finally:
        inputs.unlink()
    files = [Path(f"{out}.xml"), Path(f"{out}.bin")]
    return {
        **facts(subject, files, answers[len(validation) :].argmax(axis=1)),
        "divergence": _divergence(subject, answers[: len(validation)]),
        "versions": versions,
    }


def _validation(subject: Subject) -> np.ndarray:
    inputs: np.ndarray = subject.splits.validation.inputs
    return inputs


def _divergence(subject: Subject, answers: np.ndarray) -> float:
    return 1e3 * divergence(logits(subject.deployed, _validation(subject)), answers)


TOOLS = (
    Tool(OURS, _OURS, _ours),
    Tool(PLAIN, plain_onnxruntime.WAYS, _plain),
    Tool(NNCF, openvino_peer.WAYS, _nncf),
)
