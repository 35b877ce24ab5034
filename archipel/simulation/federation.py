"""A federation's file: model, training, strategy, data and rounds, as `archipel simulate` and `task create` read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from archipel.bundle import Bundle
from archipel.datasets.entry_names import FieldNames
from archipel.errors import ArchipelError, PolicyError, SimulationError
from archipel.graph import Model
from archipel.protocol import written
from archipel.protocol.mistakes import Mistakes, tell
from archipel.protocol.operator.aggregation import ROOTED
from archipel.protocol.operator.tasks import TaskInfo, TaskRequest
from archipel.simulation.clients import Clients, ListedClients
from archipel.simulation.federation_parts.checks import check_sources, settings_mistakes, table_mistakes
from archipel.simulation.federation_parts.data import (
    Examples,
    Partition,
    divide,
    read_examples,
    read_fields,
    read_partition,
)
from archipel.simulation.federation_parts.model import as_model, field_names, open_network
from archipel.simulation.federation_parts.models import assign_models, renamed
from archipel.simulation.federation_parts.root import take_root
from archipel.simulation.federation_parts.settings import ONCE, ROOT, Settings, TrainingPart
from archipel.simulation.federation_parts.training import make_training
from archipel.simulation.result import Result
from archipel.simulation.rounds import RoundRow
from archipel.simulation.running import Test
from archipel.simulation.simulate import simulate
from archipel.simulation.system.settings import Pacing
from archipel.simulation.system.traces import with_devices
from archipel.toml_files import put_setting, read_toml

if TYPE_CHECKING:
    from archipel.converter import Training


@dataclass(frozen=True)
class Prepared:
    """A federation whose data are read: what `simulate` takes.

    `model` is a list where devices have different ones, and `model_of` the number of each device's (None: in turn).
    `training` is None where the model is a bundle, which says itself how devices train. `root` has the server's own
    examples.
    """

    model: Model | Bundle | list[Model | Bundle]
    training: Training | None
    clients: Clients
    test: Test | None
    root: Mapping[str, Any] | None = None
    model_of: list[int] | None = None


@dataclass(frozen=True)
class Federation:
    """A federation as its file describes it.

    Arguments:
        file: where it was read; paths in it are relative to the folder that it lies in.
        settings: what it says.

    Example:
        result = load_federation("federation.toml").run(on_round=print)
        print(result.history[-1].tested)
    """

    file: Path
    settings: Settings

    def run(self, on_round: Callable[[RoundRow], object] | None = None) -> Result:
        """Simulate it. Raises what `prepare` and `simulate` raise."""
        return self.run_prepared(self.prepare(), on_round)

    def prepare(self) -> Prepared:
        """Read the data, make the model, and divide the data over the devices.

        Raises SimulationError that names the file and the key, also for what a function of the user's raises.
        """
        settings, folder = self.settings, self.file.parent
        try:
            training = self._training()
            networks = self._networks()
            examples = read_examples(settings.data, folder, settings.seed)
            root = None
            if settings.root is not None:
                root, examples = take_root(settings.root, examples, settings.data, folder, settings.seed)
            first = examples.train if isinstance(examples.train, dict) else examples.train.take(0)
            models = [each if isinstance(each, Bundle) else as_model(each, first, examples.rows) for each in networks]
            names = field_names(models[0])
            clients = self._clients(examples, names)
            return Prepared(
                model=models[0] if settings.model is not None else models,
                training=training,
                clients=clients,
                test=None if examples.test is None else read_fields(examples.test, "data.test", names),
                root=None if root is None else read_fields(root, "root", names),
                model_of=assign_models(settings.models, len(clients)),
            )
        except ArchipelError as error:
            raise _named(self.file, error) from None

    def run_prepared(
        self,
        prepared: Prepared,
        on_round: Callable[[RoundRow], object] | None = None,
        on_begin: Callable[[Result], object] | None = None,
    ) -> Result:
        """Simulate it with what `prepare` has made. `on_begin` gets the result before the first round, `on_round` a row
        after each."""
        settings, run = self.settings, self.settings.run
        try:
            return simulate(
                prepared.model, prepared.clients, training=prepared.training, rounds=settings.rounds,
                cohort=settings.cohort, hyperparameters=settings.hyperparameters, test=prepared.test,
                test_every=run.test_every, seed=settings.seed, privacy=settings.privacy, dropout=settings.dropout,
                workers=run.workers, client_axis=run.client_axis, threads=run.threads, engine=run.engine,
                cluster=run.cluster, masks=run.masks, folder=self.folder,
                keep_rounds=run.keep_rounds, on_round=on_round, on_begin=on_begin,
                aggregation=settings.aggregation, secure_groups=settings.secure_groups, protocol=settings.protocol,
                attack=settings.attack, evaluation=settings.evaluation, root=prepared.root, model_of=prepared.model_of,
                differential_privacy=settings.differential_privacy, **self._clock(),
            )  # fmt: skip
        except (SimulationError, PolicyError) as error:
            raise _named(self.file, error) from None

    @property
    def folder(self) -> Path | None:
        """Where the run keeps how far it is, None for nowhere."""
        return None if self.settings.run.folder is None else self.file.parent / self.settings.run.folder

    def task_request(self, bundle: str) -> TaskRequest:
        """The task of a server that does the same: rounds, cohort, privacy and hyperparameters, and what [task] says.

        Arguments:
            bundle: the digest of the bundle.

        Raises SimulationError that names the file and the field, and for devices with different models.
        """
        settings = self.settings
        if settings.models:
            raise SimulationError(
                f"{self.file}: as a task: models: all devices of a task have one bundle; write the one as [model]"
            )
        if settings.aggregation.rule == ROOTED and ROOT not in settings.task:
            raise SimulationError(
                f"{self.file}: as a task: task.{ROOT}: is missing; a server has no examples of its own, so rule "
                f"{ROOTED!r} takes the id of a device that you trust"
            )
        given = {name: value for name in ONCE if (value := getattr(settings, name)) is not None}
        more = dict(settings.task)
        try:
            if ROOT in more:
                given["aggregation"] = {**msgspec.to_builtins(settings.aggregation), "root": more.pop(ROOT)}
            return written.convert({**given, **more, "bundle": bundle}, TaskRequest)
        except ValueError as error:
            raise SimulationError(f"{self.file}: as a task: {error}") from None

    def replaced_by(self, task: TaskInfo, bundle: Path) -> dict[str, object]:
        """What `load_federation` puts in place of this file's values to do what a task of a server does.

        Arguments:
            task: a training.
            bundle: its bundle; the publisher's key is that of the file's `model.key`.
        """
        model = {"bundle": str(bundle.absolute()), "key": [key for each in self.settings.sources for key in each.key]}
        decided = msgspec.to_builtins({name: getattr(task, name) for name in ONCE})
        decided["aggregation"].pop(ROOT)
        pacing = {name: getattr(task, name) for name in Pacing.__struct_fields__ if getattr(task, name) is not None}
        return {**decided, "task": pacing, "model": model, "models": None, "training": None, "strategy": None}

    def _clock(self) -> dict[str, Any]:
        """The virtual clock's part of the arguments of `simulate`: what [task] says of rounds holds with it."""
        if self.settings.system is None:
            return {}
        pacing = {name: value for name, value in self.settings.task.items() if name in Pacing.__struct_fields__}
        try:
            mode = written.convert(pacing, Pacing)
        except (ValueError, SimulationError) as error:
            raise SimulationError(f"task.{error}") from None
        return {"system": with_devices(self.settings.system, self.file.parent), "mode": mode}

    def _networks(self) -> list[Any]:
        settings, found = self.settings, []
        for number, source in enumerate(settings.sources):
            try:
                found.append(open_network(source, settings.seed, self.file.parent))
            except ArchipelError as error:
                raise renamed(error, number) if settings.models else error from None
        return found

    def _training(self) -> Training | None:
        settings = self.settings
        if all(each.bundle is not None for each in settings.sources):
            for name in ("training", "strategy"):
                if getattr(settings, name) is not None:
                    raise SimulationError(f"{name}: the bundle decides it; leave it out, or convert anew with it")
            return None
        return make_training(settings.training or TrainingPart(), settings.strategy)

    def _clients(self, examples: Examples, names: FieldNames) -> Clients:
        partition, train = self._partition(), examples.train
        if not isinstance(train, dict):
            if partition is not None:
                raise SimulationError("partition: the data are divided over devices already; leave it out")
            if isinstance(train, ListedClients):
                listed = range(len(train))
                return ListedClients([read_fields(train.take(each), f"device {each}", names) for each in listed])
            assert isinstance(train, Clients)
            return _NamedClients(train, names)
        if partition is None:
            raise SimulationError('partition: is missing; give how = "iid" and clients = 10, say')
        return divide(names.take("data.train", train, examples.rows), names, partition, self.settings.seed)

    def _partition(self) -> Partition | None:
        return None if self.settings.partition is None else read_partition(self.settings.partition)


class _NamedClients:
    """Devices whose arrays get the model's names and types when they are taken."""

    def __init__(self, clients: Clients, names: FieldNames) -> None:
        self._clients, self._names = clients, names

    def __len__(self) -> int:
        return len(self._clients)

    def count(self, number: int) -> int:
        return self._clients.count(number)

    def take(self, number: int) -> Mapping[str, Any]:
        return read_fields(self._clients.take(number), f"device {number}", self._names)


def load_federation(
    file: Path | str, settings: Sequence[str] = (), replaced: Mapping[str, object] | None = None
) -> Federation:
    """The federation that a TOML file describes.

    Arguments:
        file: the file.
        settings: KEY=VALUE each, in place of the file's own, such as "rounds=5" or "strategy.mu=0.1".
        replaced: values in place of the file's by key, before the settings; None takes a key away.

    Raises SimulationError that names the file, the key and the remedy; OSError.

    Example:
        result = load_federation("federation.toml", ["rounds=5"]).run()
    """
    file = Path(file)
    try:
        table = read_toml(file)
        table = {key: value for key, value in {**table, **(replaced or {})}.items() if value is not None}
        for setting in settings:
            put_setting(table, setting, Settings.__struct_fields__, "rounds=5 or strategy.mu=0.1")
        try:
            federation = Federation(file, written.convert(table, Settings))
        except (ArchipelError, ValueError) as error:
            raise SimulationError(tell([str(error), *table_mistakes(table)])) from None
        _check(federation)
    except (ArchipelError, ValueError) as error:
        raise _named(file, error) from None
    return federation


def _check(federation: Federation) -> None:
    """Raise an error that names everything that does not fit together, before any data are read."""
    found, mistakes = federation.settings, Mistakes()
    for text in settings_mistakes(found):
        mistakes.add(SimulationError(text))
    # What is wrong in a table that other parts of archipel check.
    with mistakes.collected():
        check_sources(found)
        federation._training()  # a bundle decides it, and where none is known nothing does
    with mistakes.collected():
        federation._partition()
    with mistakes.collected():
        federation._clock()
    with mistakes.collected():
        if found.root is not None:
            found.root.check(found.data)
    mistakes.tell(SimulationError)


def _named(file: Path, error: Exception) -> SimulationError:
    text = str(error)
    if not text.startswith(str(file)):
        text = f"{file}: {text}"
    return SimulationError(text)
