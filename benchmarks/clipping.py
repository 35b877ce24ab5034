"""How much of a federation's updates a clip cuts off, and what that costs.

    python benchmarks/clipping.py              two models, two learning rates, about two minutes
    python benchmarks/clipping.py --quick      the smaller model at one rate, a few seconds

Eight devices have the digits of seven or eight pupils each; the model starts untrained, and accuracy is on the digits
of pupils who are no devices. Every round goes through the programs of a signed bundle, the fixed-point encoding in 16
bits and the check of the sum; only masks and network are left out. Clips: the default (chosen with the model, then
adapted to what devices report in the sum), a fixed clip of 1, and none that matters. `halfway` is the accuracy after
half of the rounds, `clipped` the share of all updates, `last` the clip of the last round.
`rounding` is what the encoding changes in the mean update of a round, relative to its norm: median over the rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import arguments, print_alone, state_run
from torch import nn

from archipel import convert
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.converter import Signing, Training
from archipel.datasets import DigitsByWriter, digits_by_writer, split_writers
from archipel.lite_runtime import Runtime
from archipel.models import digits_cnn, mlp
from archipel.protocol.uploads import upload_layout
from archipel.simulation import ListedClients
from archipel.simulation.kept import KeptUpdates
from archipel.simulation.one_by_one import OneByOne
from archipel.simulation.rounds import Rounds, RoundSettings
from archipel.simulation.states import MemoryStates
from archipel.simulation.work import Engine, Partial, Work
from archipel.training import losses, optimizers

DEVICES, WRITERS, ROUNDS, BITS = 8, 60, 15, 16
POLICY = PrivacyPolicy(modes=("secure",), min_cohort=2, threshold=0.6, max_clip=1e6, max_bits=BITS)
CLIPS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "clip 1": {"clip": 1.0},
    "no clip": {"clip": 1000.0, "value_range": 8.0},
}


@dataclass(frozen=True)
class Outcome:
    accuracy: float
    halfway: float
    clipped: float
    last_clip: float
    rounding: float


def main() -> None:
    options = arguments(__doc__).parse_args()
    digits = digits_by_writer()
    split = split_writers(digits, devices=WRITERS, seed=0)
    parts = [digits.of(map(int, part)) for part in np.array_split(np.array(split.devices), DEVICES)]
    held_out = digits.of(split.held_out)
    models = {"mlp": (mlp(0, hidden=32), (784,)), "cnn": (digits_cnn(0), (1, 28, 28))}
    cases = [("mlp", 0.1, 2)] if options.quick else [(m, lr, n) for m in models for lr, n in ((0.05, 1), (0.1, 2))]
    state_run(options.json)
    if not options.json:
        numbers = f"{'accuracy':>9}{'halfway':>9}{'clipped':>9}{'last':>8}{'rounding':>10}"
        print(f"{'model':<6}{'lr':>5}{'epochs':>7}  {'clip':<9}{numbers}")
    for name, rate, epochs in cases:
        for clip, chosen in CLIPS.items():
            with tempfile.TemporaryDirectory() as folder:
                bundle = make(models[name], rate, epochs, chosen, Path(folder))
                found = run(bundle, parts, held_out, models[name][1], 6 if options.quick else ROUNDS)
            if options.json:
                print_alone("clipping", f"{name}, lr {rate}, {epochs} epochs, {clip}", **vars(found))
            else:
                print(
                    f"{name:<6}{rate:>5}{epochs:>7}  {clip:<9}{found.accuracy:>9.1%}{found.halfway:>9.1%}"
                    f"{found.clipped:>9.1%}{found.last_clip:>8.3g}{found.rounding:>10.2%}",
                    flush=True,
                )


def make(model: tuple[nn.Module, tuple[int, ...]], rate: float, epochs: int, clip: Any, folder: Path) -> Bundle:
    module, shape = model
    return convert(
        module, folder / "digits", example=np.zeros((2, *shape), np.float32), privacy=POLICY,
        signing=Signing(generate_key()),
        training=Training(
            losses.cross_entropy(), optimizers.sgd(lr=rate), strategy_options={"bits": BITS, **clip}, epochs=epochs
        ),
    )  # fmt: skip


class Rounding:
    """An engine that also adds up the updates as they are, and keeps what the encoding changes in each round's sum."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.found: list[float] = []
        """The norm of the change relative to that of the sum, of each round."""

    def run(self, work: Work, clients: Sequence[int]) -> Partial:
        partial = self._engine.run(replace(work, single=True), clients)
        assert isinstance(partial.total, KeptUpdates)
        deltas = [port for port in work.layout.updates if port.kind == "delta"]
        encoded, exact = work.counted_sum(), 0.0
        for client, arrays in partial.total.updates.items():
            encoded.add(arrays, client)
            exact = exact + flat({port.tensor: arrays[port.name] for port in deltas})
        change = flat(encoded.decoded(partial.counted).deltas) - exact
        self.found.append(float(np.linalg.norm(change) / np.linalg.norm(exact)))
        return replace(partial, total=encoded)

    def close(self) -> None:
        self._engine.close()


def run(
    bundle: Bundle, parts: list[DigitsByWriter], held_out: DigitsByWriter, shape: tuple[int, ...], rounds: int
) -> Outcome:
    clients = ListedClients([{"input": part.inputs().reshape(-1, *shape), "label": part.targets()} for part in parts])
    engine = Rounding(OneByOne(bundle, clients, MemoryStates()))
    course, runtime, accuracies = Rounds(bundle, DEVICES, RoundSettings(cohort=DEVICES), None), Runtime(bundle), []
    for _ in range(rounds):
        course.run(engine)
        runtime.set_parameters(course.standing.parameters)
        answers = runtime.predict(held_out.inputs().reshape(-1, *shape))
        accuracies.append(float((answers.argmax(1) == held_out.targets()).mean()))
    rows = course.standing.rows
    fixed = max(port.clip or 0.0 for port in upload_layout(bundle.manifest, "training").updates)
    return Outcome(
        accuracies[-1], accuracies[rounds // 2 - 1], sum(row.clipped or 0 for row in rows) / (rounds * DEVICES),
        rows[-1].clip or fixed, float(np.median(engine.found)),
    )  # fmt: skip


def flat(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """All elements in one row, in the order of the tensors' names."""
    return np.concatenate([tensors[name].ravel().astype(np.float64) for name in sorted(tensors)])


if __name__ == "__main__":
    main()
