"""How many private images a server reads out of one secure sum with crafted weights ("trap weights").

Boenisch et al. 2021, "When the curious abandon honesty". Twelve devices with ten images each train one batch of an MLP;
the server sees their sum alone. A hidden neuron whose bias is so low that one image of all wakes it up has that image
as its gradient, divided by the gradient of its bias. An image counts as read where a neuron's quotient has a cosine of
at least 0.99 with it.

Rows: how many of the 120 images are read, beside the number where devices take any weights.
  honest weights         what the sum tells of the bundle's own weights, which nobody crafted
  crafted at once        what devices with a weights log accept of a server that sends the crafted weights
  N lies                 the server says of N rounds that their sums were what leads towards the trap, each as far as
                         the strategy's bound allows; then it reads one sum. The log does not stop this, it limits the
                         pace: to the norm that the publisher's clip allows a round.

Usage: python benchmarks/attacks/trap.py [--quick] [--json]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure import Report, Row, arguments

from archipel import strategies, training
from archipel.bundle import Bundle, generate_key
from archipel.converter import Signing, Training, convert
from archipel.datasets import digits_by_writer
from archipel.errors import ProvenanceError
from archipel.lite_runtime import Runtime
from archipel.models import mlp
from archipel.protocol.provenance import check_distance
from archipel.protocol.vector import Layout

DEVICES, IMAGES = 12, 10
ALIKE = 0.99
CLIPS = (1.0, 0.1)
LIES = (1, 3, 10, 30, 100)
LEARNING_RATE = 0.1

Weights = dict[str, np.ndarray]
Examples = list[dict[str, np.ndarray]]


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(options.json, ("numpy", "onnxruntime", "torch"))
    private, public = draw(seed=0)
    for clip, lies in ((CLIPS[0], LIES[:1]),) if options.quick else ((clip, LIES) for clip in CLIPS):
        with tempfile.TemporaryDirectory() as folder:
            bundle = make_bundle(Path(folder) / "mlp", private, clip)
            report.add(rows(bundle, clip, lies, private, public))


def rows(bundle: Bundle, clip: float, lies: Sequence[int], private: Examples, public: np.ndarray) -> Iterator[Row]:
    own = {name: np.array(array) for name, array in bundle.parameters().items()}
    trap = crafted(own, public, radius=np.inf, everything=True)
    taken = read_images(bundle, trap, private)

    def row(case: str, weights: Weights) -> Row:
        ours = read_images(bundle, weights, private)
        name = "devices that take any weights"
        return Row("trap", f"clip {clip:g}, {case}", ours, taken, name, ours / max(taken, 1), "images of 120")

    yield row("honest weights", own)
    yield row("crafted at once", trap if is_accepted(bundle, trap, own, rounds=1) else own)
    for rounds in lies:
        moved = crafted(own, public, radius=0.999 * rounds * bound(bundle), everything=False)
        assert is_accepted(bundle, moved, own, rounds)
        yield row(f"{rounds} {'lie' if rounds == 1 else 'lies'}", moved)


def draw(seed: int) -> tuple[Examples, np.ndarray]:
    """Ten digits of each of twelve people, and what the server has: digits of others, float32 [n, 784]."""
    digits = digits_by_writer()
    generator = np.random.default_rng(seed)
    writers = [w for w in np.unique(digits.writers) if np.sum(digits.writers == w) >= IMAGES]
    chosen = generator.choice(writers, DEVICES, replace=False)
    private = []
    for writer in chosen:
        rows = np.flatnonzero(digits.writers == writer)[:IMAGES]
        private.append({"input": flat(digits.images[rows]), "label": digits.labels[rows].astype(np.int64)})
    return private, flat(digits.images[~np.isin(digits.writers, chosen)])


def flat(images: np.ndarray) -> np.ndarray:
    return (images.reshape(len(images), -1) / np.float32(255)).astype(np.float32)


def make_bundle(path: Path, private: Examples, clip: float) -> Bundle:
    return convert(
        mlp(seed=0),
        path,
        example=private[0]["input"],
        training=Training(
            training.losses.cross_entropy(),
            training.optimizers.sgd(lr=LEARNING_RATE),
            strategy_options={"clip": clip, "bits": 24},
            batch_size=IMAGES,
        ),
        signing=Signing(generate_key()),
    )


def bound(bundle: Bundle) -> float:
    return strategies.get("fedavg").step_bound(bundle.manifest, {}, DEVICES).parameters


def is_accepted(bundle: Bundle, weights: Weights, own: Weights, rounds: int) -> bool:
    """Whether a device takes weights that so many rounds are said to have made of the bundle's own."""
    try:
        check_distance("weights", weights, own, rounds * bound(bundle), rounds)
    except ProvenanceError:
        return False
    return True


def crafted(own: Weights, public: np.ndarray, *, radius: float, everything: bool) -> Weights:
    """`own` with neurons of the first layer that wake up for one image of the cohort's; all within `radius` of it.

    Where the server may change everything, it makes the later layers pass on whatever comes, too.
    """
    made = {name: array.copy() for name, array in own.items()}
    weight, bias = made["hidden1.weight"], made["hidden1.bias"]
    rows = weight if weight.shape[1] == public.shape[1] else weight.T
    wakes = np.quantile(public @ rows.T, 1 - 1 / (DEVICES * IMAGES), axis=0)
    needed = -wakes - bias
    cheapest = np.argsort(np.abs(needed))
    paid = np.sqrt(np.cumsum(needed[cheapest] ** 2))
    chosen = cheapest[paid <= radius]
    bias[chosen] += needed[chosen].astype(np.float32)
    if everything:
        for name in ("hidden2.weight", "output.weight"):
            made[name] = np.abs(made[name])
        made["output.weight"][0] *= -1 if made["output.weight"].shape[0] == 10 else 1
    return made


def read_images(bundle: Bundle, weights: Weights, private: Examples) -> int:
    """The devices train on `weights`, their updates are encoded and summed as in a secure round, the server reads."""
    runtime = Runtime(bundle)
    layout = Layout.of(bundle.program("finish"))
    total = np.zeros(layout.length, np.uint32)
    for number, fields in enumerate(private):
        update = runtime.local_round(fields, seed=number, parameters=weights)
        total += layout.encode(update.arrays, modulus_bits=32, max_cohort=DEVICES)
    deltas = layout.decode_sum(total, cohort=DEVICES, modulus_bits=32).deltas
    changes, biases = deltas["hidden1.weight"], deltas["hidden1.bias"]
    images = np.concatenate([fields["input"] for fields in private])
    rows = changes if changes.shape[1] == images.shape[1] else changes.T
    awake = np.abs(biases) > 1e-9
    guesses = rows[awake] / biases[awake, None]
    norms = np.linalg.norm(guesses, axis=1, keepdims=True)
    guesses = guesses[norms[:, 0] > 0] / norms[norms[:, 0] > 0]
    cosines = guesses @ (images / np.linalg.norm(images, axis=1, keepdims=True)).T
    return len({int(np.argmax(row)) for row in cosines if row.max() >= ALIKE})


if __name__ == "__main__":
    main()
