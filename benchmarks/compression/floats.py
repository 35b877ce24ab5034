"""Train the float models of the compression study; each is kept as ONNX with its accuracy, and trained once.

    python benchmarks/compression/floats.py [--folder .cache/compression] [--data ../shared/data] [NAME ...]

NAME is a case of cases.py; all of them without one. Killed, it goes on where it was, to the epoch. NAME-SEED.onnx and
NAME-SEED.json are written when a model is done. Ends with status 1 if a model's accuracy is below its floor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cases import CASES, Case, Phase, read, shrunk
from stamp import Stamp, stamp
from verdict import Outcome, at_least, wilson

from archipel.datasets import Labelled, LabelledSplits
from archipel.durable import write_durably

if TYPE_CHECKING:
    from archipel.graph import Model
    from archipel.training.cloud import Epoch

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
FOLDER = ROOT / ".cache" / "compression"
EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Trained:
    """What is known of a trained float model; accuracies are 0..1, the test's is measured on the ONNX file."""

    name: str
    seed: int
    data: str
    floor: float
    validation_accuracy: float
    test_accuracy: float
    test_examples: int
    parameters: int
    bytes: int
    seconds: float  # of all epochs, wall time
    epochs: int
    digest: str
    stamp: Stamp

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the test accuracy, over test examples alone."""
        return wilson(self.test_accuracy, self.test_examples)

    @property
    def reached(self) -> Outcome:
        return at_least(self.floor, *self.interval)


def onnx_path(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-{seed}.onnx"


def trained(name: str, seed: int, folder: Path, data: Path) -> Trained:
    """The model's facts, and its ONNX file at `onnx_path`; trains it if it is not there or was made otherwise."""
    case = CASES[name]
    digest = case.digest(seed)
    facts_path, model_path = folder / f"{name}-{seed}.json", onnx_path(folder, name, seed)
    if facts_path.exists() and model_path.exists():
        facts = Trained(**json.loads(facts_path.read_text()))
        if facts.digest == digest:
            return facts
    splits = read(case.data, data)
    network, seconds, epochs = _train(case, name, seed, splits, folder / "checkpoints" / f"{name}-{seed}-{digest}")
    model = _exported(network, splits.test.inputs[:2])
    content = model.to_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(model_path, content)
    facts = Trained(
        name=name,
        seed=seed,
        data=case.data,
        floor=case.floor,
        validation_accuracy=accuracy(model, splits.validation),
        test_accuracy=accuracy(model, splits.test),
        test_examples=len(splits.test),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        bytes=len(content),
        seconds=round(seconds, 1),
        epochs=epochs,
        digest=digest,
        stamp=stamp(),
    )
    # Last: a model with facts is complete.
    write_durably(facts_path, json.dumps(asdict(facts), indent=2).encode())
    return facts


def accuracy(model: Model, examples: Labelled) -> float:
    """The share of examples whose largest output is that of their class, by ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _threads()
    session = onnxruntime.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    correct = 0
    for begin in range(0, len(examples), EVALUATION_BATCH):
        rows = slice(begin, begin + EVALUATION_BATCH)
        (logits,) = session.run(None, {name: examples.inputs[rows]})
        correct += int((logits.argmax(1) == examples.labels[rows]).sum())
    return correct / len(examples)


def _train(case: Case, name: str, seed: int, splits: LabelledSplits, checkpoints: Path) -> tuple[Any, float, int]:
    """(the network in evaluation mode, seconds of all its epochs, their number)."""
    from archipel.training import optimizers, schedules
    from archipel.training.cloud import TrainConfig, train

    network, seconds, epochs = case.network(seed), 0.0, 0
    for index, phase in enumerate(case.phases):
        examples = _fields(splits.train, phase)
        steps = phase.epochs * -(-len(splits.train) // phase.batch_size)
        rate = schedules.one_cycle(phase.learning_rate, steps, pct_start=0.25, anneal="linear")
        result = train(
            network,
            examples,
            TrainConfig(
                optimizer=optimizers.sgd(momentum=0.9, nesterov=True, weight_decay=phase.weight_decay, lr=rate),
                decay="matrices",
                epochs=phase.epochs,
                batch_size=phase.batch_size,
                seed=seed + 1000 * index,
                augment=case.augment(),
                checkpoint=str(checkpoints.with_name(f"{checkpoints.name}-{index}")),
            ),
            validation=_fields(splits.validation, phase),
            on_epoch=lambda epoch, of=phase.epochs: _say_epoch(f"{name}-{seed}", epoch, of),
        )
        network = result.module
        seconds += sum(epoch.seconds for epoch in result.history)
        epochs += len(result.history)
    return network, seconds, epochs


def _fields(examples: Labelled, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    return shrunk(examples.inputs, phase.shrink), examples.labels


def _exported(network: Any, example: np.ndarray) -> Model:
    """BatchNormalization stays: compression may train on, and folds it itself."""
    from archipel.graph import Model

    return Model.from_torch(network, example.copy())


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", "2"))


def _say_epoch(name: str, epoch: Epoch, of: int) -> None:
    _say(
        f"{name}: epoch {epoch.number}/{of}, training loss {epoch.train_loss:.4f}, validation loss "
        f"{epoch.metrics['loss']:.4f}, accuracy {epoch.metrics['accuracy']:.2%}, {epoch.seconds:.0f} s"
    )


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where models are kept (default %(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of all data sets (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a model on standard output, nothing else")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}: expected one of {', '.join(CASES)}")

    import torch

    torch.set_num_threads(_threads())
    ok = True
    for name in options.names or CASES:
        for seed in CASES[name].seeds:
            facts = trained(name, seed, options.folder, options.data)
            ok = ok and facts.test_accuracy >= facts.floor
            if options.json:
                print(json.dumps(asdict(facts)), flush=True)
            else:
                missed = "" if facts.test_accuracy >= facts.floor else f", below its floor of {facts.floor:.1%}"
                print(
                    f"{name:<22}seed {seed}  test {facts.test_accuracy:7.2%}{missed}  "
                    f"{facts.parameters:>9,} parameters  {facts.epochs:>3} epochs  {facts.seconds:6.0f} s",
                    flush=True,
                )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
