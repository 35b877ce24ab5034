"""What one device among ten and twenty can do to a model within the bounds of a secure sum.

    python benchmarks/attacks/one_device.py              a few minutes
    python benchmarks/attacks/one_device.py --quick      ten devices, the strongest attack only, under a minute
    python benchmarks/attacks/one_device.py --forms      the crudest forms only, a few seconds
    python benchmarks/attacks/one_device.py --json       one JSON object a row

Pupils' devices go on training, by federated averaging with a clip of 1 (at last, of 0.1, which is about the norm of one
device's honest update), a network that census staff's digits have trained; accuracy is on the digits of pupils who are
no devices. One device sends what it likes: its masked entries are beyond its own range, which nobody sees. It knows
what the others send, and goes as far as the check of the sum allows (0.98 of it). Directions: `flip`, what training on
digits with wrong labels gives; `reverse`, the negative of its honest update; `random`, the same random one in every
round. `when` are the rounds that the attacker is in.

First come the crudest forms, of one device in one round: entries as far beyond its range as the sum's encoding holds, a
weight that cancels the others', and both. Shown is how far the model would move if nobody looked, and how far it moves.

Limits: `bound`, a sum that devices which keep to their program could not have sent is rejected, and no more; `median`,
steps beyond three times the running median are scaled down besides, which is what the server does. For `flood` nothing
is rejected: the sum is as large as its encoding holds, as before there were bounds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import arguments, print_alone, state_run

from archipel import convert, strategies
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.converter import Signing, Training
from archipel.datasets import DigitsByWriter, digits_by_writer, split_writers
from archipel.errors import BoundError
from archipel.lite_runtime import Runtime
from archipel.models import digits_cnn
from archipel.protocol.bounds import groups, step, sum_bound
from archipel.protocol.vector import Layout
from archipel.strategies.step_limits import History, keep_within
from archipel.training import losses, optimizers

CLIP, TIGHT, BITS = 1.0, 0.1, 16
ROUNDS, AS_FAR_AS = 20, 0.98
Tensors = dict[str, np.ndarray]


@dataclass
class Row:
    devices: int
    clip: float
    attack: str
    when: str
    limits: str
    accuracy: float
    worst: float
    honest_step: float
    longest_step: float
    scaled: int


WHEN: dict[str, Callable[[int], bool]] = {
    "all rounds": lambda number: True,
    "from round 6": lambda number: number >= 6,
    "every third": lambda number: number % 3 == 0,
}


class Federation:
    """Devices with their pupils' digits, and the model that they begin with."""

    def __init__(self, folder: Path, most: int, clip: float) -> None:
        digits = digits_by_writer()
        split = split_writers(digits, devices=most, seed=0)
        policy = PrivacyPolicy(modes=("secure",), min_cohort=10, threshold=0.67, max_clip=clip, max_bits=BITS)
        self.bundle: Bundle = convert(
            digits_cnn(0), folder / "digits", example=np.zeros((2, 1, 28, 28), np.float32),
            training=Training(losses.cross_entropy(), optimizers.sgd(),
                              strategy_options={"clip": clip, "value_range": clip / 2, "bits": BITS}, epochs=2,
                              batch_size=10),
            privacy=policy, signing=Signing(generate_key()),
        )  # fmt: skip
        self.clip, self.strategy = clip, strategies.get("fedavg")
        self.layout = Layout.of(self.bundle.program("finish"))
        self.runtime = Runtime(self.bundle)
        staff = digits.of(split.cloud_train)
        self.runtime.fit(
            staff.inputs(), staff.targets(), epochs=12, batch_size=32, seed=0, hyperparameters={"lr": 0.05}
        )
        self.start = {name: array.copy() for name, array in self.runtime.parameters().items()}
        self.devices = [digits.of([writer]) for writer in split.devices]
        self.held_out = digits.of(split.held_out)

    def accuracy(self, parameters: Tensors) -> float:
        self.runtime.set_parameters(parameters)
        answers = self.runtime.predict(self.held_out.inputs())
        return float((answers.argmax(1) == self.held_out.targets()).mean())

    def local(self, parameters: Tensors, device: DigitsByWriter, number: int, shift: int = 0) -> Tensors:
        labels = (device.targets() + shift) % 10
        return self.runtime.local_round(device.inputs(), labels, seed=number, parameters=parameters).arrays

    def encode(self, arrays: Tensors, cohort: int) -> np.ndarray:
        return self.layout.encode(arrays, modulus_bits=32, max_cohort=cohort)

    def direction(self, attack: str, parameters: Tensors, number: int) -> np.ndarray:
        """Of the attacker's deltas, in whole steps of the encoding, float64 [entries]."""
        if attack == "random":
            return np.random.default_rng(7).standard_normal(self.layout.length - 1)
        arrays = self.local(parameters, self.devices[0], number, shift=1 if attack in ("flip", "flood") else 0)
        deltas = np.concatenate([arrays[port.name].ravel() for port in self.layout.updates if port.kind == "delta"])
        return -deltas if attack == "reverse" else deltas


def attacked(federation: Federation, honest: np.ndarray, way: np.ndarray, cohort: int, attack: str) -> np.ndarray:
    """The sum that the attacker makes of the honest devices' (int64 [entries + weight]), whose last is its weight 1."""
    layout = federation.layout
    (deltas,) = groups(layout.updates)
    total = honest.astype(np.float64)
    total[-1] += round(1 / step(layout.updates[-1]))
    weights = total[-1] * step(layout.updates[-1])
    one, most = step(deltas.ports[0]), cohort * (2 ** (BITS - 1) - 1)
    if attack == "flood":
        total[:-1] = np.sign(way) * most
        return total.astype(np.int64)
    goal = AS_FAR_AS * sum_bound(layout.updates, deltas, cohort, weights) / one
    # |honest + f way| = goal, for f > 0
    a, b, c = way @ way, total[:-1] @ way, total[:-1] @ total[:-1] - goal**2
    total[:-1] += (-b + np.sqrt(b * b - a * c)) / a * way
    return np.clip(np.rint(total), -most, most).astype(np.int64)


def run(federation: Federation, devices: int, attack: str, when: str, limits: str) -> Row:
    """Twenty rounds."""
    parameters, layout = dict(federation.start), federation.layout
    steps: list[float] = []
    plain: list[float] = []
    accuracies, scaled = [], 0
    for number in range(1, ROUNDS + 1):
        attacks = attack != "none" and WHEN[when](number)
        total = np.zeros(layout.length, np.int64)
        for index in range(1 if attacks else 0, devices):
            arrays = federation.local(parameters, federation.devices[index], 100 * number + index)
            total += federation.encode(arrays, devices).view(np.int32)
        if attacks:
            total = attacked(federation, total, federation.direction(attack, parameters, number), devices, attack)
        decoded = layout.decode_sum(total.astype(np.int32).view(np.uint32), cohort=devices, modulus_bits=32)
        if limits != "none":
            layout.check_sum(decoded, devices)
        after = federation.strategy.apply(parameters, {}, decoded, devices, {})
        bound = federation.strategy.step_bound(federation.bundle.manifest, {}, devices)
        if limits == "none":
            parameters = after[0]
            norm = float(np.sqrt(sum(np.square(decoded.deltas[n]).sum() for n in parameters))) / (decoded.weight or 1)
        else:
            history = History(steps if limits == "median" else [])
            parameters, _, made = keep_within((parameters, {}), after, bound, history)
            norm, scaled = made.parameters, scaled + (made.scale < 1)
        steps.append(norm)
        if not attacks:
            plain.append(norm)
        accuracies.append(federation.accuracy(parameters))
    return Row(
        devices, federation.clip, attack, when if attack != "none" else "-", limits, accuracies[-1], min(accuracies),
        float(np.median(plain)) if plain else float("nan"), max(steps), scaled,
    )  # fmt: skip


@dataclass
class Form:
    """`unlooked` and `now` are norms of the model's step; `verdict` is what the check of the sum says."""

    form: str
    unlooked: float
    now: float
    verdict: str


def forms(federation: Federation, devices: int) -> Iterator[Form]:
    """The first round, with each of the crudest attacks."""
    layout, parameters = federation.layout, federation.start
    sent = [
        federation.encode(federation.local(parameters, federation.devices[i], i), devices).view(np.int32).astype(int)
        for i in range(devices)
    ]
    others = np.sum(sent[1:], axis=0)
    far = np.append(np.sign(sent[0][:-1] + 0.5) * (devices - 1) * (2 ** (BITS - 1) - 1), sent[0][-1]).astype(int)
    cancels = 1 - others[-1]
    for name, mine in {
        "none": sent[0],
        "entries beyond their range": far,
        "weight entry cancelled": np.append(sent[0][:-1], cancels),
        "both": np.append(far[:-1], cancels),
    }.items():
        total = (others + mine).astype(np.int32).view(np.uint32)
        decoded = layout.decode_sum(total, cohort=devices, modulus_bits=32)
        after, _ = federation.strategy.apply(parameters, {}, decoded, devices, {})
        moved = float(np.sqrt(sum(np.square(after[n].astype(float) - parameters[n]).sum() for n in after)))
        try:
            layout.check_sum(decoded, devices)
        except BoundError as error:
            yield Form(name, moved, 0.0, str(error).partition(", of ")[0])
        else:
            yield Form(name, moved, moved, "taken")


def cases(quick: bool) -> Iterator[tuple[float, int, str, str, str]]:
    """Clip, devices, attack, when, limits."""
    if quick:
        yield CLIP, 10, "none", "all rounds", "median"
        yield CLIP, 10, "flip", "all rounds", "bound"
        yield CLIP, 10, "flip", "every third", "median"
        return
    for devices in (10, 20):
        yield CLIP, devices, "none", "all rounds", "median"
        yield CLIP, devices, "flood", "all rounds", "none"
        for attack in ("flip",) if devices > 10 else ("flip", "reverse", "random"):
            for when in WHEN:
                if attack != "flip" and when != "all rounds":
                    continue
                for limits in ("bound", "median"):
                    yield CLIP, devices, attack, when, limits
    for attack in ("none", "flip", "reverse"):
        yield TIGHT, 10, attack, "all rounds", "median"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--forms", action="store_true")
    options = parser.parse_args()
    state_run(options.json, ("numpy", "onnxruntime", "torch"))
    with tempfile.TemporaryDirectory() as folder:
        federations = {clip: Federation(Path(folder) / str(clip), 20, clip) for clip in (CLIP, TIGHT)}
        start = federations[CLIP].accuracy(federations[CLIP].start)
        print(f"before the first round: {start:.4f}", file=sys.stderr)
        if not options.json:
            print(f"{'one round':>28}{'step if nobody looked':>23}{'step now':>10}  verdict")
        for form in forms(federations[CLIP], 10):
            if options.json:
                print_alone("one_device", form.form, step_if_nobody_looked=form.unlooked, step=form.now)
            else:
                print(f"{form.form:>28}{form.unlooked:>23.4g}{form.now:>10.4g}  {form.verdict}", flush=True)
        if options.forms:
            return
        if not options.json:
            print(f"{'devices':>8}{'clip':>6}{'attack':>9}{'when':>14}{'limits':>8}{'after 20':>10}{'worst':>8}"
                  f"{'honest step':>13}{'longest':>10}{'scaled':>8}")  # fmt: skip
        for clip, *case in cases(options.quick):
            row = run(federations[clip], *case)
            if options.json:
                print_alone(
                    "one_device",
                    f"{row.devices} devices, clip {row.clip:g}, {row.attack}, {row.when}, limits {row.limits}",
                    accuracy_after_20_rounds=row.accuracy, worst_accuracy=row.worst, honest_step=row.honest_step,
                    longest_step=row.longest_step, rounds_scaled=row.scaled,
                )  # fmt: skip
            else:
                print(f"{row.devices:>8}{row.clip:>6}{row.attack:>9}{row.when:>14}{row.limits:>8}{row.accuracy:>10.4f}"
                      f"{row.worst:>8.4f}{row.honest_step:>13.4f}{row.longest_step:>10.4g}{row.scaled:>8}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
