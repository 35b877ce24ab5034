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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import arguments, print_alone, state_run
from torch import nn

from archipel import convert, strategies
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.converter import Signing, Training
from archipel.datasets import DigitsByWriter, digits_by_writer, split_writers
from archipel.lite_runtime import Runtime
from archipel.models import digits_cnn, mlp
from archipel.protocol.training_metrics import CLIPPED, UPDATE_CLIP, training_arrays
from archipel.protocol.uploads import clip_input, upload_layout
from archipel.strategies.clipping import next_clip
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


def run(
    bundle: Bundle, parts: list[DigitsByWriter], held_out: DigitsByWriter, shape: tuple[int, ...], rounds: int
) -> Outcome:
    manifest, runtime, strategy = bundle.manifest, Runtime(bundle), strategies.get("fedavg")
    finish, layout = bundle.program("finish"), upload_layout(bundle.manifest, "training")
    port, parameters = clip_input(finish), bundle.parameters()
    clip = None if port is None else port.default
    clipped, accuracies, roundings = [], [], []
    for number in range(rounds):
        total, exact, weights, cut = np.zeros(layout.length, np.int64), 0.0, 0.0, 0
        for index, part in enumerate(parts):
            update = runtime.local_round(
                part.inputs().reshape(-1, *shape), part.targets(), seed=100 * number + index, parameters=parameters,
                hyperparameters={} if clip is None else {UPDATE_CLIP: clip},
            )  # fmt: skip
            arrays = {**update.arrays, **training_arrays(manifest, finish, update.arrays, update.metrics)}
            total += layout.encode(arrays, modulus_bits=32, max_cohort=DEVICES).view(np.int32)
            exact = exact + flat({each.tensor: arrays[each.name] for each in layout.updates if each.kind == "delta"})
            weights += float(arrays[f"{strategy.name}/weight"])
            cut += int(update.metrics[CLIPPED])
        decoded = layout.decode_sum(total.astype(np.int32).view(np.uint32), cohort=DEVICES, modulus_bits=32)
        layout.check_sum(decoded, DEVICES)
        roundings.append(float(np.linalg.norm(flat(decoded.deltas) - exact) / np.linalg.norm(exact)))
        parameters, _ = strategy.apply(parameters, {}, decoded, DEVICES, {})
        clipped.append(cut)
        last = port.default if port is not None and clip is None else clip
        if port is not None and clip is not None:
            clip = next_clip(clip, cut, DEVICES, port)
        runtime.set_parameters(parameters)
        answers = runtime.predict(held_out.inputs().reshape(-1, *shape))
        accuracies.append(float((answers.argmax(1) == held_out.targets()).mean()))
    fixed = max(each.clip or 0.0 for each in layout.updates)
    return Outcome(
        accuracies[-1], accuracies[len(accuracies) // 2 - 1], sum(clipped) / (rounds * DEVICES),
        fixed if last is None else last, float(np.median(roundings)),
    )  # fmt: skip


def flat(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """All elements in one row, in the order of the tensors' names."""
    return np.concatenate([tensors[name].ravel().astype(np.float64) for name in sorted(tensors)])


if __name__ == "__main__":
    main()
