"""Which engines train the zoo: the same step graph, data and first weights on each, against ONNX Runtime.

Every network of archipel.models learns for 20 steps by SGD with momentum. Told for each engine: the largest difference
of a loss from ONNX Runtime's (relative, for losses below 1 absolute), or what stands in the way; and the time of a step
over ONNX Runtime's, the fastest of some in turns (2 threads; ONNX Runtime Web has one, under Node). Each engine has a
process of its own, OpenVINO and IREE an environment of their own (`--install-peers`).

    python benchmarks/engines.py                        every network and engine (half an hour)
    python benchmarks/engines.py --quick                three networks, small batches, engines that are installed
    python benchmarks/engines.py --only LSTM --engine iree --batch 4
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import step_cases as steps
from jobs import write_values
from lite_peers import DEFAULT_FOLDER, HERE, PeerError, clean_environment, install, python_of
from measure import PAUSE, arguments, state_run

THREADS, STEPS, BATCHES = 2, 20, 4
ROUNDS, SECONDS = 40, 6.0
TOLERANCE = 1e-4
OURS = "onnxruntime"
ENVIRONMENTS = {
    "openvino": ("openvino==2026.4.1", "numpy"),
    "iree": ("iree-base-compiler[onnx]==3.13.0", "iree-base-runtime==3.13.0", "numpy"),
}
NAMES = {
    "openvino": "OpenVINO", "iree": "IREE", "web": "ONNX Runtime Web", "reference": "onnx.reference"
}  # fmt: skip
WORDS = 60
"""The size of vocabularies: onnx.reference gathers from at most 64 classes (GatherElements by way of numpy.choose)."""


def text(make: str, length: int, **options: str) -> steps.Case:
    return steps.Case(make, (length,), WORDS, (("vocabulary", WORDS), *options.items()), vocabulary=WORDS)


CASES = {
    **steps.CASES,
    "LSTM": text("char_rnn", 80, cell="lstm"),
    "GRU": text("char_rnn", 80, cell="gru"),
    "Transformer": text("transformer", 64),
    "digits CNN": steps.Case("digits_cnn", (1, 28, 28), 10),
    "autoencoder": steps.Case("autoencoder", (1, 28, 28), 0),
    "U-Net": steps.Case("unet", (1, 32, 32), 2),
}
QUICK = ("MLP", "1D-CNN", "digits CNN")
SLOWEST = 2
"""Examples in a minibatch for onnx.reference, which is written to be read."""
NODE = HERE.parent.parent / "web"


@dataclass(frozen=True)
class Outcome:
    """An engine's `error` against ONNX Runtime's losses, or the `reason` that it has none; `ratio` of step times."""

    error: float | None = None
    reason: str = ""
    ratio: float | None = None
    plain: bool = False


def batch_of(name: str, batch: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    case = CASES[name]
    if name == "autoencoder":
        pictures = rng.random((batch, *case.shape), np.float32)
        return pictures, pictures
    if case.vocabulary:
        return rng.integers(0, case.vocabulary, (batch, *case.shape)), rng.integers(
            0, case.classes, (batch, *case.shape)
        )
    labels = (batch, *case.shape[1:]) if name == "U-Net" else batch
    return rng.standard_normal((batch, *case.shape), np.float32), rng.integers(0, case.classes, labels)


def write_job(name: str, batch: int, folder: Path) -> None:
    """The step graph as it is emitted, with plain Scans, and with the batch fixed, too; data and values."""
    from archipel import Model, training

    case, rng = CASES[name], np.random.default_rng(0)
    data = [batch_of(name, batch, rng) for _ in range(BATCHES)]
    model = Model.from_torch(steps.network(case).train(), data[0][0][:2])
    losses = training.losses
    loss = losses.mse() if name == "autoencoder" else losses.cross_entropy(axis=-1 if case.vocabulary else 1)
    # With batch statistics in 52 layers on top of one another rounding grows from step to step: PyTorch differs from
    # itself by a tenth after fifty if only its number of threads changes.
    norm = "frozen" if name == "MobileNetV2" else "train"
    step = training.step_graph(model, loss, training.optimizers.sgd(momentum=0.9), batch_norm=norm)
    step.save(folder / "step.onnx")
    step.plain_scans().save(folder / "plain.onnx")
    Model.from_onnx(folder / "plain.onnx").fix(sizes={"batch": batch}).save(folder / "fixed.onnx")
    write_values(step, 0.005, data, folder, steps=STEPS)


class Trainer:
    """An engine's process, which has trained: `losses`, or `failure`; `megabytes` is the peak of its memory by then.

    `python` is of the engine's environment, `script` (of benchmarks/peers) what it runs, `settings` variables of its
    environment.
    """

    def __init__(
        self,
        engine: str,
        folder: Path,
        python: Path | None = None,
        script: str = "train_steps.py",
        threads: int = THREADS,
        settings: dict[str, str] | None = None,
    ) -> None:
        self._log = folder / f"{engine}.log"
        answers, its_end = os.pipe()
        # Libraries print to standard output as they like.
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, HERE / script, engine, folder, str(threads), str(its_end)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[its_end],
                env=clean_environment() | (settings or {}),
            )  # fmt: skip
        os.close(its_end)
        self._answers = os.fdopen(answers)
        told = self._answer()
        self.losses: list[float] = told.get("losses", [])
        self.failure: str = told.get("error", "")
        self.megabytes: float = told.get("megabytes", 0.0)

    @property
    def plain(self) -> bool:
        """Whether it trains the form with plain Scans, because it does not take the other."""
        return "plain" in self._log.read_text(errors="replace").splitlines()

    def milliseconds(self, processor_time: bool = False) -> float:
        """One step, by the clock or of the process's own processor time."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer()["processor" if processor_time else "milliseconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._answers.close()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            words = self._log.read_text(errors="replace").split()
            said = f"; its last words: {' '.join(words)[-200:]}" if words else ""
            return {"error": f"the process ended with status {self._process.wait()}{said}"}
        return dict(json.loads(line))


def train(engine: str, folder: Path, peers: Path, ours: Trainer) -> Outcome:
    if engine == "web":
        return train_in_node(folder, ours)
    python = python_of(peers, f"engines-{engine}", "benchmarks/engines.py") if engine in ENVIRONMENTS else None
    trainer = Trainer(engine, folder, python)
    try:
        if trainer.failure:
            return Outcome(reason=trainer.failure)
        times: list[tuple[float, ...]] = []
        end = time.perf_counter() + SECONDS
        while len(times) < 3 or (len(times) < ROUNDS and time.perf_counter() < end):
            turn = []
            for each in (ours, trainer):
                time.sleep(PAUSE)
                turn.append(each.milliseconds())
            times.append(tuple(turn))
        # The fastest of each: a step takes less than the slice of time that another process on this machine gets.
        best = [min(column) for column in zip(*times)]
        return Outcome(difference(trainer.losses, ours.losses), "", best[1] / best[0], trainer.plain)
    finally:
        trainer.close()


def train_in_node(folder: Path, ours: Trainer) -> Outcome:
    """ONNX Runtime Web by the runner of its tests, with steps of ONNX Runtime before and after."""
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules" / "onnxruntime-web").is_dir():
        raise PeerError("needs Node.js and `npm ci` in web/")

    def described(path: Path) -> dict[str, Any]:
        return {
            name: {
                "type": array.dtype.name,
                "dims": list(array.shape),
                "data": base64.b64encode(np.asarray(array, order="C").tobytes()).decode(),
            }
            for name, array in np.load(path).items()
        }

    feeds = [described(path) for path in sorted(folder.glob("feed*.npz"))]
    job = {
        "graph": str(folder / "step.onnx"),
        "initial": described(folder / "initial.npz"),
        "feeds": [feeds[i % len(feeds)] for i in range(STEPS)],
        "carried": json.loads((folder / "job.json").read_text())["carried"],
        "metric": "loss",
    }
    (folder / "web.json").write_text(json.dumps(job))
    times = [ours.milliseconds() for _ in range(10)]
    command = [node, NODE / "tests" / "run_steps.mjs", folder / "web.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    times += [ours.milliseconds() for _ in range(10)]
    if done.returncode:
        return Outcome(reason=" ".join(done.stderr.split())[-300:])
    told = json.loads(done.stdout.splitlines()[-1])
    ratio = min(told["milliseconds"][3:]) / min(times)
    return Outcome(difference(told["losses"], ours.losses), "", ratio)


def difference(losses: list[float], expected: list[float]) -> float:
    return float(max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, expected, strict=True)))


def outcomes(name: str, engines: list[str], batch: int, peers: Path) -> Iterator[tuple[str, int, Outcome]]:
    """Engine, minibatch and outcome, with ONNX Runtime's process beside it."""
    for size in dict.fromkeys(min(batch, SLOWEST) if engine == "reference" else batch for engine in engines):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_job(name, size, folder)
            ours = Trainer(OURS, folder)
            if ours.failure:
                raise SystemExit(f"{name}: ONNX Runtime: {ours.failure}")
            for engine in engines:
                if size == (min(batch, SLOWEST) if engine == "reference" else batch):
                    try:
                        yield engine, size, train(engine, folder, peers, ours)
                    except PeerError as error:
                        yield engine, size, Outcome(reason=f"not here: {error}")
            ours.close()


def text_of(outcome: Outcome) -> str:
    if outcome.error is None:
        return outcome.reason
    ratio = "" if outcome.ratio is None else f", {outcome.ratio:.2f} of the time"
    form = ", plain Scans" if outcome.plain else ""
    return f"{outcome.error:.1e}{'' if outcome.error <= TOLERANCE else ' TOO FAR'}{ratio}{form}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="only this network; can be repeated")
    parser.add_argument("--engine", action="append", choices=NAMES, help="only this engine; can be repeated")
    parser.add_argument("--batch", type=int, help="examples in a minibatch (default 32, with --quick 4)")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="the folder of the engines' environments")
    parser.add_argument("--install-peers", action="store_true", help="make these environments first (0.7 GB)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.install_peers:
        for engine, packages in ENVIRONMENTS.items():
            install(options.peers, f"engines-{engine}", packages)
    state_run(options.json, ("numpy", "onnx", "onnxruntime", "torch"))
    for name in options.only or (QUICK if options.quick else CASES):
        batch = options.batch or (4 if options.quick else 32)
        for engine, size, outcome in outcomes(name, options.engine or list(NAMES), batch, options.peers):
            if options.json:
                # A step's time over ONNX Runtime's is all that is kept of the times, so `ours` and `peer` are null.
                row = {"case": name, "ours": None, "peer": None, "peer_name": "ONNX Runtime", "unit": "ms"}
                row |= {"engine": NAMES[engine], "batch": size, **vars(outcome)}
                print(json.dumps({"benchmark": "engines", **row}), flush=True)
            else:
                print(f"{name:<14}{NAMES[engine]:<18}batch {size:<4}{text_of(outcome)}", flush=True)


if __name__ == "__main__":
    main()
