"""The demo, stage by stage; every stage adds its measurements to the results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress, TaskID

from archipel.bundle import generate_key
from archipel.cli.start.demo import cloud, measure
from archipel.cli.start.demo.flat import compare, run_flat
from archipel.cli.start.demo.fleet import Federation, device_name, examples_of, round_row, vanish_plan
from archipel.cli.start.demo.results import FormRow, ModelScore, Results, count_committed
from archipel.cli.start.demo.tree import TreeFederation, places_of
from archipel.cli.start.local.processes import Processes
from archipel.cli.start.local.rounds import ended_rounds
from archipel.datasets import DigitsByWriter, digits_by_writer, split_own_digits, split_writers
from archipel.lite_runtime import Runtime
from archipel.operator.curves import curves
from archipel.protocol.operator.tasks import RoundInfo
from archipel.protocol.policy import colluders_of
from archipel.training.cloud import Epoch

HOSTS = 4
LEARNING_RATE = 0.02
PERSONAL_RATE = 0.02
PERSONAL_EPOCHS = 5


@dataclass(frozen=True)
class Options:
    rounds: int
    devices: int
    seed: int
    edges: int = 0
    """How many edge servers are between the server and the devices; 0: none, the devices are at the server itself."""


class Story:
    """Runs all stages, and holds what later stages need from earlier ones.

    `federation` is there after its stage has begun, and runs until the processes are closed.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        processes: Processes,
        progress: Progress,
        digits: DigitsByWriter | None = None,
    ) -> None:
        self.options = options
        self.folder = folder
        self._processes = processes
        self._progress = progress
        self._key = generate_key()
        self._digits = digits if digits is not None else digits_by_writer()
        self._split = split_writers(self._digits, devices=options.devices, seed=options.seed)
        self._held_out = self._digits.of(self._split.held_out)
        self.federation: Federation | None = None
        self.results = Results(
            seed=options.seed,
            devices=options.devices,
            processes=0,
            parameters=0,
            held_out_writers=len(self._split.held_out),
            held_out_digits=len(self._held_out),
            staff_digits=len(self._digits.of(self._split.cloud_train)),
            device_digits=len(self._digits.of(self._split.devices)),
        )

    def run(self) -> Results:
        published = self._cloud()
        # One runtime for measuring: a float predict whose parameters are replaced by those of each round.
        runtime = Runtime(published.float_bundle)
        cloud_correct = self._correct(runtime.predict)
        counts = measure.by_writer(np.ones(len(self._held_out)), self._held_out)[0]
        self._score("cloud", cloud_correct, counts)
        federation = self._serve(published)
        final, seen = self._rounds(federation, published, runtime)
        if isinstance(federation, TreeFederation):
            self._compare_tree(federation, published, seen, final)
        self._compare(published, runtime, final, cloud_correct, counts)
        self.results.processes = self._processes.count
        self.results.peak_memory = self._processes.peak_memory
        return self.results

    def _cloud(self) -> cloud.Published:
        with self._stage("train in the cloud", None) as (bar, _):

            def on_epoch(epoch: Epoch) -> None:
                text = f"epoch {epoch.number}, validation {100 * epoch.metrics['accuracy']:.2f}%"
                self._progress.update(bar, description=f"train in the cloud: {text}")

            model, self.results.epochs = cloud.train(self._digits, self._split, self.options.seed, on_epoch)
        best = [row for row in self.results.epochs if row.best][-1]
        with self._stage("compress, convert, sign", None):
            published = cloud.publish(
                model, self._digits, self._split, self._key, self.folder, best.validation_accuracy,
                # As many at most as the first edge server has.
                largest_site=-(-self.options.devices // self.options.edges) if self.options.edges else None,
            )  # fmt: skip
        self.results.parameters = cloud.count_parameters(published.bundle)
        return published

    def _serve(self, published: cloud.Published) -> Federation:
        devices = len(self._split.devices)
        edges, servers = self.options.edges, "servers" if self.options.edges else "server"
        with self._stage(f"start the {servers}, enrol devices", devices) as (bar, _):
            public = self._key.public_key().public_bytes_raw()
            examples = examples_of(self._digits, self._split.devices, cloud.image_field(published.bundle))
            home, names = self.folder / "federation", [device_name(writer) for writer in self._split.devices]
            federation = (
                TreeFederation(home, self._processes, public, examples, edges)
                if edges
                else Federation(home, self._processes, public, examples)
            )
            self.federation = federation
            places = places_of(names, edges) if edges else None
            federation.start_devices(HOSTS, vanish_plan(names, self.options.rounds, self.options.seed, places))
            federation.wait_until_enrolled(lambda done: self._progress.update(bar, completed=done))
        return federation

    def _rounds(
        self, federation: Federation, published: cloud.Published, runtime: Runtime
    ) -> tuple[dict[str, np.ndarray], list[RoundInfo]]:
        """Watch the rounds; returns the parameters of the last one, and all rounds with their devices."""
        rounds = self.options.rounds
        parameters: dict[str, np.ndarray] = {}
        seen: list[RoundInfo] = []
        with self._stage("secure rounds", rounds) as (bar, _):
            devices = len(self._split.devices)
            threshold = math.ceil(cloud.THRESHOLD * devices)
            task = federation.create_task(
                published.file,
                rounds=rounds,
                threshold=threshold,
                # A task's `min_cohort` counts all devices; the bundle's policy counts those that are left when the
                # colluders among them are taken away.
                min_cohort=cloud.MIN_COHORT + colluders_of(published.bundle.manifest.privacy, devices),
                lr=LEARNING_RATE,
            )

            def on_open(info: RoundInfo) -> None:
                self._progress.update(bar, description=f"secure rounds: {info.number}, {info.phase}")

            for ended in ended_rounds(federation, task, on_open):
                info = federation.with_devices(ended)
                seen.append(info)
                if info.weights_out is not None:
                    parameters = federation.operator.weights.read(info.weights_out)
                self._round_row(info, federation, runtime, parameters)
                self._progress.update(bar, completed=count_committed(self.results.rounds))
        self.results.curves = curves(list(federation.operator.tasks.metrics(task)))
        self.results.fleet = federation.rows(self._digits, self._split.devices, seen)
        return parameters, seen

    def _compare_tree(
        self, tree: TreeFederation, published: cloud.Published, seen: list[RoundInfo], final: dict[str, np.ndarray]
    ) -> None:
        """The same devices at one server, and the last round computed again without any."""
        with self._stage("the same devices at one server", None):
            public = self._key.public_key().public_bytes_raw()
            examples = examples_of(self._digits, self._split.devices, cloud.image_field(published.bundle))
            flat = run_flat(self.folder / "flat", public, examples, published, self.options.seed, LEARNING_RATE)
            self.results.tree = compare(tree, flat, published.bundle, seen, final, LEARNING_RATE)

    def _round_row(
        self, info: RoundInfo, federation: Federation, runtime: Runtime, parameters: dict[str, np.ndarray]
    ) -> None:
        accuracy = None
        if info.phase == "committed":
            runtime.set_parameters(parameters)
            accuracy = float(self._correct(runtime.predict).sum()) / len(self._held_out)
        self.results.rounds.append(round_row(federation, info, accuracy))

    def _compare(
        self,
        published: cloud.Published,
        runtime: Runtime,
        final: dict[str, np.ndarray],
        cloud_correct: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        writers = self._split.held_out
        with self._stage("measure and personalise", len(writers)) as (_, advance):
            runtime.set_parameters(final)
            float_answers = measure.predictions(runtime.predict, self._held_out)
            federated = self._by_writer(float_answers)
            self._score("federated", federated, counts, ("cloud", cloud_correct))
            int8 = Runtime(published.bundle)
            int8.set_parameters(final)
            int8_answers = measure.predictions(int8.predict, self._held_out)
            self._score("federated, int8", self._by_writer(int8_answers), counts, ("federated", federated))
            self.results.agreement = float((int8_answers == float_answers).mean())
            self._forms(published, runtime, int8, float_answers, int8_answers)
            self._personalise(runtime, final, advance)

    def _personalise(self, runtime: Runtime, final: dict[str, np.ndarray], advance: Callable[[], None]) -> None:
        """Each held-out pupil's own device: fit on one half of the digits, measure on the other."""
        published = {name: np.array(values) for name, values in runtime.bundle.parameters().items()}
        rows = []
        for writer in self._split.held_out:
            own, other = split_own_digits(self._digits, writer, seed=self.options.seed)
            answers = []
            for parameters in (published, final):
                runtime.set_parameters(parameters)
                answers.append(measure.predictions(runtime.predict, other))
            runtime.fit(
                own.inputs(),
                own.targets(),
                epochs=PERSONAL_EPOCHS,
                batch_size=cloud.BATCH_SIZE,
                seed=self.options.seed,
                hyperparameters={"lr": PERSONAL_RATE},
            )
            answers.append(measure.predictions(runtime.predict, other))
            rows.append([len(other), *((answer == other.targets()).sum() for answer in answers)])
            advance()
        counts, base, federated, personal = np.array(rows).T
        self._score("cloud", base, counts, halves=True)
        self._score("federated", federated, counts, ("cloud", base), halves=True)
        self._score("personalised", personal, counts, ("federated", federated), halves=True)

    def _forms(
        self,
        published: cloud.Published,
        runtime: Runtime,
        int8: Runtime,
        float_answers: np.ndarray,
        int8_answers: np.ndarray,
    ) -> None:
        image = self._held_out.inputs()[:1]
        times = measure.latencies({"float32": runtime.predict, "int8": int8.predict}, image)
        truth = self._held_out.targets()
        for name, path, answers in (
            ("float32", published.float_onnx, float_answers),
            ("int8", published.int8_onnx, int8_answers),
        ):
            accuracy = float((answers == truth).mean())
            self.results.forms.append(FormRow(name, path.stat().st_size, times[name], accuracy))

    def _correct(self, predict: measure.Predict) -> np.ndarray:
        return self._by_writer(measure.predictions(predict, self._held_out))

    def _by_writer(self, answers: np.ndarray) -> np.ndarray:
        correct = (answers == self._held_out.targets()).astype(np.float64)
        return measure.by_writer(correct, self._held_out)[0]

    def _score(
        self,
        name: str,
        correct: np.ndarray,
        counts: np.ndarray,
        against: tuple[str, np.ndarray] | None = None,
        *,
        halves: bool = False,
    ) -> None:
        interval = None
        if against is not None:
            interval = measure.paired_interval(correct, against[1], counts, self.options.seed)
        score = ModelScore(
            name, float(correct.sum() / counts.sum()), correct / counts, against[0] if against else None, interval
        )
        (self.results.halves if halves else self.results.scores).append(score)

    @contextmanager
    def _stage(self, name: str, total: int | None) -> Iterator[tuple[TaskID, Callable[[], None]]]:
        bar = self._progress.add_task(name, total=total)
        started = time.perf_counter()
        yield bar, lambda: self._progress.advance(bar)
        self.results.stages.append((name, time.perf_counter() - started))
        self._progress.update(bar, description=name, total=total or 1, completed=total or 1)
