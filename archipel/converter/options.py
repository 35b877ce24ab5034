"""The groups of arguments that `convert` takes. Each checks its own fields when it is made."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import strategies
from archipel.bundle import Lineage
from archipel.bundle.validation import MAX_EPOCHS, MAX_POPULATIONS, MAX_WHOLE, check_digest, check_file_name
from archipel.compression.examples import Data
from archipel.compression.part import Part
from archipel.compression.recipe import check_parts, check_sets, load_recipe
from archipel.compression.work import Progress
from archipel.converter.arguments import check_above_zero, check_instance, check_struct, check_whole
from archipel.converter.device_half.federated import check_steps, schedule
from archipel.converter.statistics import AnyStatistic, check_statistics
from archipel.errors import ArchipelError, ConversionError
from archipel.strategies.device import DeviceHalf, describe
from archipel.training.arguments import check_part, check_patterns
from archipel.training.losses import LOSS_METHODS, Loss
from archipel.training.optimizers import OPTIMIZER_METHODS, Optimizer
from archipel.training.step import StepOptions, check_options
from archipel.training.step_engines import ONNX_RUNTIME

DAY, VALID_DAYS = 86400, 730
BATCH_SIZE = 16
MAX_EXAMPLES = 1000
LOSS_RANGE = 64.0
"""Far above the cross entropy of a model that has learned nothing: ln of the number of classes."""


@dataclass(frozen=True)
class Training:
    """How devices train the model.

    Arguments:
        loss: one of training.losses, of the output `loss_output`.
        optimizer: one of training.optimizers.
        trainable: a glob over names of parameters, or a list of globs ("*": all). Other parameters stay constant.
        step_options: further arguments of `training.step_graph`, by name: `transforms`, `accumulate`, `batch_norm`
            (which `evaluate` and `predict` follow), `dropout`, `per_example`, `precision`, `kernels`, `recompute`
            ("auto": for batches of `batch_size`). Not `steps`: devices hand one batch at a time to the train program.
            `batch_norm` "train" averages running statistics over the devices; "frozen" and "folded" keep the model's
            own (docs/strategies.md says when).
        strategy: the federated algorithm, by its name in archipel.strategies.STRATEGIES.
        strategy_options: the options of its device half (docs/strategies.md).
        epochs: passes over a device's examples in a round, from 1 to 10,000; some strategies have their own number for
            a part of the round.
        batch_size: examples of a step, 1 or more.
        loss_range: rounds report the training's mean loss, on devices with a larger one this number instead, and say
            on how many. Its resolution is this number divided by 2^15 with the default of 16 bits. None: rounds report
            no metrics. With DP-SGD they report none in any case.
        loss_output: the name of the model's output that the loss and the metrics read; it becomes the first output of
            `predict`. None: the first.

    Raises:
        TrainingError: for a wrong loss, optimizer, pattern or value in `step_options`.
        ConversionError: for any other argument. Whether patterns match and gradients exist is checked with the model.

    Example:
        Training(losses.cross_entropy(), optimizers.sgd(lr=0.05), trainable="head.*", epochs=2, batch_size=10)
    """

    loss: Loss
    optimizer: Optimizer
    _: KW_ONLY
    trainable: str | Sequence[str] = "*"
    step_options: StepOptions = field(default_factory=StepOptions)
    strategy: str = "fedavg"
    strategy_options: Mapping[str, object] = field(default_factory=dict)
    epochs: int = 1
    batch_size: int = BATCH_SIZE
    loss_range: float | None = LOSS_RANGE
    loss_output: str | None = None

    def __post_init__(self) -> None:
        check_part("training", "losses", self.loss, LOSS_METHODS)
        check_part("training", "optimizers", self.optimizer, OPTIMIZER_METHODS)
        check_patterns("training", self.trainable)
        if not self.trainable:
            raise ConversionError("training: trainable is empty; name at least one parameter, or '*'")
        _check_step_options(self.step_options)
        check_whole("training: epochs", self.epochs, 1, MAX_EPOCHS)
        check_whole("training: batch_size", self.batch_size, 1)
        if self.loss_range is not None:
            check_above_zero("training: loss_range", self.loss_range)
        if self.loss_output is not None:
            check_instance("training: loss_output", self.loss_output, str, "the name of an output")
        half = self.half
        check_steps(self.optimizer, self.step_options, half, self.strategy)
        # A strategy's own numbers of epochs are among its options.
        for phase in schedule(half, self.epochs, self.batch_size):
            if phase.steps is None:
                check_whole(f"training: strategy_options: epochs of {phase.program!r}", phase.epochs, 1, MAX_EPOCHS)

    @property
    def half(self) -> DeviceHalf:
        """The strategy's device half with these options. Raises ArchipelError where there is none."""
        check_instance("training: strategy", self.strategy, str, "the name of a strategy")
        algorithm = strategies.get(self.strategy)
        return describe(algorithm.name, algorithm.device, self.strategy_options)


@dataclass(frozen=True, eq=False)  # comparing arrays gives arrays, not True or False
class Compression:
    """How the model is compressed before it becomes programs, as by `compress`.

    Devices predict with the compressed graph and train its float parameters; `refresh` rounds them anew.

    Arguments:
        recipe: parts, in the order in which they are applied, or the path of a TOML file, which is read here.
        data: examples for training, `[examples, ...]` each: arrays by name with the labels under "label", or a tuple
            with the labels last.
        calibration: examples without labels. None: those of `data`.
        validation: as `data`.
        seed: of every random choice, a whole number of 0 or more.
        engine: what trains: "onnxruntime", or "torch", "torch:cpu", "torch:cuda:1" ..., as for `compress`.
        folder: keeps checkpoints, from which the same call goes on after it was stopped or killed.
        on_progress: is called with each Progress of the run, and may raise KeyboardInterrupt to stop it.

    Raises:
        CompressionError: for a wrong recipe, or where examples are missing that a part of it needs.
        ConversionError: for any other argument. Shapes are checked with the model.

    Example:
        Compression([StaticInt8()], calibration=images)
        Compression("recipe.toml", data=(x, y), validation=(x_val, y_val), folder="run")
    """

    recipe: Sequence[Part] | str | os.PathLike[str]
    _: KW_ONLY
    data: Data | None = field(default=None, repr=False)
    calibration: Data | None = field(default=None, repr=False)
    validation: Data | None = field(default=None, repr=False)
    seed: int = 0
    engine: str = ONNX_RUNTIME
    folder: str | os.PathLike[str] | None = None
    on_progress: Callable[[Progress], None] | None = None
    parts: tuple[Part, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        read = load_recipe(self.recipe) if isinstance(self.recipe, str | os.PathLike) else check_parts(self.recipe)
        object.__setattr__(self, "parts", tuple(read))
        check_sets(
            self.parts, {"data": self.data, "calibration": self.calibration, "validation": self.validation}
        )  # fmt: skip
        check_whole("compression: seed", self.seed, 0)
        if self.folder is not None:
            check_instance("compression: folder", self.folder, str | os.PathLike, "a path")
        if self.on_progress is not None and not callable(self.on_progress):
            raise ConversionError(
                f"compression: on_progress: expected a function that takes a Progress, got {self.on_progress!r}"
            )


@dataclass(frozen=True)
class Signing:
    """Who signs the bundle, what it replaces, and for whom and until when devices may take part in rounds with it.

    Arguments:
        key: the publisher's Ed25519 private key. `archipel keys FILE` makes one, `bundle.load_private_key` reads it.
        sequence: a whole number of 0 or more. Devices stop using bundles of this name and publisher that have a
            smaller one.
        not_after: the end of its use in rounds, in Unix seconds. None: two years from today, at midnight UTC. 0: it
            has no end.
        populations: those that may use it, at most 64 names of letters, digits, ".", "_" and "-". Empty: any.
        parent: the digest (64 hexadecimal digits) of the bundle that this one replaces. It goes into the lineage, with
            the recipe and the measurements of `compress`.
        lineage: replaces these three: parent, recipe and measurements. The agreement that the conversion measures is
            added.

    Raises:
        ConversionError, BundleError: for a wrong value.

    Example:
        Signing(load_private_key("publisher"))
        Signing(key, sequence=3, populations=["staff"], parent=old.digest)
    """

    key: Ed25519PrivateKey
    _: KW_ONLY
    sequence: int = 0
    not_after: int | None = None
    populations: Sequence[str] = ()
    parent: str | None = None
    lineage: Lineage | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, Ed25519PrivateKey):
            raise ConversionError(
                f"signing: key: expected an Ed25519 private key, got {type(self.key).__name__}; `archipel keys FILE` "
                "makes one, bundle.load_private_key reads it"
            )
        check_whole("signing: sequence", self.sequence, 0, MAX_WHOLE)
        if self.not_after is not None:
            check_whole("signing: not_after (Unix seconds)", self.not_after, 0, MAX_WHOLE)
        _check_populations(self.populations)
        if self.parent is not None:
            check_instance("signing: parent", self.parent, str, "a bundle's digest")
            check_digest("signing: parent", self.parent)
        if self.lineage is not None:
            check_struct("signing: lineage", self.lineage, Lineage)
            if self.lineage.parent is not None:
                check_digest("signing: lineage.parent", self.lineage.parent)
            if self.parent not in (None, self.lineage.parent):
                raise ConversionError(
                    f"signing: parent is {self.parent}, but that of lineage is {self.lineage.parent}; give it in "
                    "lineage alone"
                )

    @property
    def end(self) -> int:
        """The manifest's `not_after`, in Unix seconds."""
        return default_not_after() if self.not_after is None else self.not_after


@dataclass(frozen=True)
class Analysis:
    """The statistics of the model's outputs that an analytics task collects over a population, without training.

    Arguments:
        statistics: one or more of converter.Sum, Mean, Histogram and Quantiles, each with a name of its own.
        max_examples: how many of a device's examples count at most, 1 or more. Counts of that size must fit the
            `max_bits` of the privacy policy.

    Raises:
        ConversionError: for a statistic that is not possible. Whether its output exists is checked with the model.

    Example:
        Analysis([Mean(name="light", low=0, high=1), Histogram(name="peak", edges=[0.2, 0.4])], max_examples=200)
    """

    statistics: Sequence[AnyStatistic]
    _: KW_ONLY
    max_examples: int = MAX_EXAMPLES

    def __post_init__(self) -> None:
        check_statistics(self.statistics)
        check_whole("analysis: max_examples", self.max_examples, 1)


def default_not_after() -> int:
    """Two years from today, at midnight UTC, so that bundles that are made on one day are equal."""
    return (int(time.time()) // DAY + VALID_DAYS) * DAY


def _check_step_options(options: object) -> None:
    if not isinstance(options, Mapping):
        raise ConversionError(f"step_options must be a mapping from name to value, is {options!r}")
    known = StepOptions.__optional_keys__
    for name in options:
        if name not in known:
            raise ConversionError(f"step_options: no option {name!r}; step_graph has {', '.join(sorted(known))}")
    if options.get("steps", 1) != 1:
        raise ConversionError(
            f"step_options: steps={options['steps']!r}, but devices hand one batch at a time to the train program; "
            "leave steps out, or use accumulate= for updates from several batches"
        )
    check_options(**options)


def _check_populations(populations: object) -> None:
    if isinstance(populations, str) or not isinstance(populations, Sequence):  # a text is a Sequence too
        raise ConversionError(f"signing: populations: expected a list of names, got {populations!r}")
    for name in populations:
        check_instance("signing: populations", name, str, "names")
        try:
            check_file_name(name)
        except ArchipelError:
            raise ConversionError(
                f"signing: populations: expected names of 1 to 128 letters, digits, '.', '_', '-', got {name!r}"
            ) from None
    if len(set(populations)) > MAX_POPULATIONS:
        raise ConversionError(
            f"signing: populations: expected at most {MAX_POPULATIONS}, got {len(set(populations))}; name none where "
            "any may use the bundle"
        )
