"""What an update costs on the wire, and what packing it into fewer bytes costs in error and accuracy.

    python benchmarks/update_compression.py                   each method with 30 rounds, a few minutes
    python benchmarks/update_compression.py --quick           ten rounds and some of the methods, a minute
    python benchmarks/update_compression.py --plot FILE.png   draws accuracy against bytes as well

40 pupils are devices, ten of them in a round; a small dense network of 50,890 elements
starts untrained, and devices make an epoch of SGD in batches of 20 on their digits. `bytes` are those of one upload,
`error` is how far the first round's step is from that of the same updates without rounding, relative to it, and the
accuracy is on digits of pupils who are no devices. Rounds are those of `archipel.simulate`, secure ones with the exact
sums of whole numbers that masks leave; masks and messages, which do not depend on the method, are not counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import arguments, print_alone, state_run

import archipel
from archipel.bundle import Bundle, generate_key
from archipel.converter import Signing, Training
from archipel.datasets import DigitsByWriter, digits_by_writer, split_writers
from archipel.models import mlp
from archipel.protocol.narrow import masked_size
from archipel.protocol.plain import plain_size
from archipel.protocol.uploads import upload_layout
from archipel.strategies.update_compression import carried
from archipel.training import losses, optimizers

DEVICES, COHORT, ROUNDS, CLIP = 40, 10, 30, 0.5
EXACT: Mapping[str, Any] = {"bits": 24}
SECURE: Mapping[str, Mapping[str, Any]] = {
    "16 bits, nearest step": {"bits": 16},
    "8 bits, nearest step": {"bits": 8},
    "4 bits, nearest step": {"bits": 4},
    "8 bits, rotation": {"bits": 8, "compress": "rotation"},
    "4 bits, rotation": {"bits": 4, "compress": "rotation"},
    "2 bits, rotation": {"bits": 2, "compress": "rotation"},
    "8 bits, random 10 %": {"bits": 8, "compress": "random_k", "share": 0.1},
    "8 bits, random 1 %": {"bits": 8, "compress": "random_k", "share": 0.01},
    "rank 4": {"compress": "low_rank", "compress_rank": 4},
    "rank 1": {"compress": "low_rank", "compress_rank": 1},
}
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "4 bits, rotation": {"bits": 4, "compress": "rotation"},
    "8 bits, random 1 %": {"bits": 8, "compress": "random_k", "share": 0.01},
    "rank 4": {"compress": "low_rank", "compress_rank": 4},
    "largest 10 %": {"compress": "top_k", "share": 0.1},
    "largest 1 %": {"compress": "top_k", "share": 0.01},
    "largest 0.1 %": {"compress": "top_k", "share": 0.001},
}
QUICK = {"16 bits, nearest step", "4 bits, nearest step", "4 bits, rotation", "float32", "largest 1 %", "rank 4"}

Client = tuple[np.ndarray, np.ndarray]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--plot", metavar="FILE", help="draw accuracy against bytes")
    options = parser.parse_args()
    digits = digits_by_writer()
    split = split_writers(digits, devices=DEVICES, seed=0)
    clients, test = [whole(digits.of([writer])) for writer in split.devices], whole(digits.of(split.held_out))
    rounds = 10 if options.quick else ROUNDS
    state_run(options.json)
    found: dict[tuple[str, str], tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        reference = {name: first_step(make(EXACT, where / name), clients, name) for name in ("secure", "plain")}
        for privacy, methods in (("secure", SECURE), ("plain", PLAIN)):
            if not options.json:
                when = f"{f'round {rounds // 2}':>10}{f'round {rounds}':>10}"
                print(f"{privacy + ' rounds':<24}{'bytes':>9}{'error':>9}{when}")
            for number, (name, given) in enumerate(methods.items()):
                if options.quick and name not in QUICK:
                    continue
                bundle = make(given, where / f"{privacy}{number}")
                step = first_step(bundle, clients, privacy)
                error = distance(step, reference[privacy]) / distance(reference[privacy])
                half, last = accuracies(bundle, clients, test, privacy, rounds)
                size = upload_bytes(bundle, privacy)
                found[privacy, name] = size, last
                if options.json:
                    print_alone(
                        "update_compression", f"{privacy}, {name}", bytes=size, error=error, half=half, last=last
                    )
                else:
                    print(f"{name:<24}{size:>9,}{error:>9.3f}{half:>10.1%}{last:>10.1%}", flush=True)
    if options.plot:
        plot(found, options.plot)


def make(given: Mapping[str, Any], folder: Path) -> Bundle:
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=0.1), epochs=1, batch_size=20,
        strategy_options={"clip": CLIP, "weighting": "uniform", **given},
    )  # fmt: skip
    return archipel.convert(
        mlp(0, hidden=64), folder, example=np.zeros((2, 784), np.float32), training=training,
        signing=Signing(generate_key()),
    )  # fmt: skip


def upload_bytes(bundle: Bundle, privacy: str) -> int:
    layout = upload_layout(bundle.manifest, "training")
    if privacy == "plain":
        return plain_size(layout)
    return masked_size(layout, COHORT, layout.modulus_bits(COHORT), narrow=bool(carried(bundle.manifest)))


def first_step(bundle: Bundle, clients: Sequence[Client], privacy: str) -> np.ndarray:
    result = archipel.simulate(bundle, clients, rounds=1, cohort=COHORT, privacy=privacy, client_axis="on")
    start = bundle.parameters()
    return np.concatenate(
        [(result.parameters[name].astype(np.float64) - start[name]).ravel() for name in sorted(start)]
    )


def distance(first: np.ndarray, second: np.ndarray | float = 0.0) -> float:
    return float(np.linalg.norm(first - second))


def accuracies(
    bundle: Bundle, clients: Sequence[Client], test: Client, privacy: str, rounds: int
) -> tuple[float, float]:
    """The accuracy after half of the rounds and after all."""
    result = archipel.simulate(
        bundle, clients, rounds=rounds, cohort=COHORT, privacy=privacy, test=test, test_every=rounds // 2,
        client_axis="on",
    )  # fmt: skip
    for row in result.history:
        if row.failed:
            raise SystemExit(f"round {row.number}: {row.failed}")
    half, last = (result.history[number - 1].tested["accuracy"] for number in (rounds // 2, rounds))
    return half, last


def plot(found: Mapping[tuple[str, str], tuple[int, float]], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for privacy, marker in (("secure", "o"), ("plain", "s")):
        points = {name: point for (mode, name), point in found.items() if mode == privacy}
        axes.scatter(*zip(*points.values()), marker=marker, label=f"{privacy} rounds")
        for name, point in points.items():
            axes.annotate(name, point, textcoords="offset points", xytext=(4, 4), fontsize=7, rotation=45)
    axes.set(xscale="log", xlabel="bytes of an upload", ylabel="accuracy", ylim=(0, 1.1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def whole(digits: DigitsByWriter) -> Client:
    return digits.inputs().reshape(-1, 784), digits.targets()


if __name__ == "__main__":
    main()
