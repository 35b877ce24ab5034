"""`simulate`: a federation of a model and its devices' data on this machine, without a server."""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.bundle import Bundle, load_public_key, open_bundle
from archipel.bundle.development import development_key, generate_development_key
from archipel.durable import write_durably
from archipel.errors import SignatureError, SimulationError
from archipel.graph import Model
from archipel.lite_runtime.training.driver import data_ports
from archipel.privacy.central import settle
from archipel.protocol.messages import Protocol
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.operator.tasks import Mode
from archipel.simulation.attacks import Attack
from archipel.simulation.choosing import ClientAxis
from archipel.simulation.clients import Clients, add_client, as_clients, two_of
from archipel.simulation.evaluation import Evaluation, hold_out_each
from archipel.simulation.result import Result
from archipel.simulation.rounds import RoundRow, RoundSettings
from archipel.simulation.running import Cluster, RunOptions, Test, run
from archipel.simulation.saved import make
from archipel.simulation.several import SeveralModels
from archipel.simulation.system import Pacing, System
from archipel.simulation.system.traces import with_devices
from archipel.strategies.robust import Aggregation

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from archipel.converter import Training
    from archipel.training.losses import Loss
    from archipel.training.optimizers import Optimizer


def simulate(
    model: Any,
    clients: Clients | Sequence[Any],
    strategy: str = "fedavg",
    *,
    rounds: int,
    cohort: int | None = None,
    model_of: Sequence[int] | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    epochs: int = 1,
    batch_size: int = 16,
    strategy_options: Mapping[str, object] | None = None,
    training: Training | None = None,
    hyperparameters: Mapping[str, float] | None = None,
    test: Test | None = None,
    test_every: int = 1,
    evaluation: Evaluation | None = None,
    held_out: Clients | Sequence[Any] | None = None,
    seed: int = 0,
    privacy: str = "secure",
    aggregation: str | Aggregation = "mean",
    tolerated: int = 0,
    secure_groups: int = 0,
    protocol: Protocol | None = None,
    root: Any = None,
    attack: str | Attack = "",
    attackers: float | Sequence[int] = 0.0,
    differential_privacy: DifferentialPrivacy | None = None,
    dropout: float = 0.0,
    mode: Mode | Pacing = "semi-synchronous",
    system: System | None = None,
    workers: int = 1,
    client_axis: ClientAxis = "auto",
    threads: int = 1,
    engine: str = "onnxruntime",
    cluster: Cluster = "local",
    masks: bool = False,
    folder: Path | str | None = None,
    keep_rounds: bool = False,
    on_round: Callable[[RoundRow], object] | None = None,
    on_begin: Callable[[Result], object] | None = None,
) -> Result:
    """Train a model over simulated devices, with the programs, the server's half and the sums of a real federation.

    Arguments:
        model: a PyTorch module, a Model, or a Bundle that trains; a bundle has a strategy and a training of its own. A
            list of such gives devices different models, for a strategy that shares none of them ("feddistill").
        clients: the devices' examples: for each a mapping from field to `[examples, ...]`, or a tuple (inputs, labels);
            or Clients, such as `SplitClients(arrays, datasets.split_dirichlet(...))`.
        strategy: the federated algorithm, a name in `archipel.strategies.STRATEGIES`.
        rounds: how many.
        cohort: devices drawn for each round; None: all.
        model_of: of several models, the number of each client's; None: in turn.
        loss: one of training.losses; None: cross entropy.
        optimizer: one of training.optimizers; None: SGD with a learning rate of 0.1.
        epochs, batch_size: of a device's training in a round.
        strategy_options: of the strategy's device half (docs/strategies.md).
        training: how devices train, in place of `loss`, `optimizer`, `epochs`, `batch_size`, `strategy` and its
            options; it has more settings, such as which parameters are trained.
        hyperparameters: by name, as a task has them: of the programs, such as "lr", and of the server's half, such as
            "server_lr".
        test: examples on which the model is measured every `test_every` rounds and after the last one: a tuple (inputs,
            labels) or a mapping.
        evaluation: has devices measure the model, each on examples of its own that it does not train with, and a
            personalised model each with its own tensors; then a round's row has `spread`, and `clients` what each
            measured.
        held_out: for each client the examples for that, in the form of `clients`, in place of a share of these.
        seed: decides cohorts, dropouts, orders and all that graphs draw. The same seed gives the same result, whatever
            the number of workers.
        privacy: "secure" adds up the whole numbers that secure rounds add up (without masks, which cancel), "plain"
            floating point.
        aggregation: "mean", or a robust rule over single updates of plain rounds (docs/robust.md): a name, or an
            Aggregation, which may say more.
        tolerated: how many updates, or groups, of a round may be arbitrary, for a rule given by name.
        secure_groups: has the rule work over the sums of so many secure groups instead; 0: one sum of all devices.
        protocol: of secure rounds, for the bytes that a `system` counts and for `masks`: "complete", where every device
            deals with all others, or "neighbours" (docs/protocol.md); None: what a server chooses by the cohort and the
            bundle's privacy policy.
        root: examples of the server's own, like those of a client, for the rule "fltrust".
        attack: what attackers do, a name or an Attack: over updates, "sign-flip", "ipm", "alie", "mimic", "gaussian",
            "best-ipm" or "best-alie"; over their examples, "label-flip" or "backdoor".
        attackers: the share of the clients that attack, or these by number, for an attack given by name.
        differential_privacy: noise that the server, or each device, adds to the sums, and what it may cost
            (docs/privacy.md): the run ends before the round that would cost more.
        dropout: the share of drawn devices, 0 to below 1, that leave before their update counts.
        mode: when a round takes its updates, as a task's; a Pacing has goal, deadlines and the like as well. It needs
            a `system`.
        system: speeds, networks and hours of the devices; then a virtual clock times the rounds, and a round's row has
            `time`, bytes and staleness. Without it a round has no duration.
        workers, client_axis, threads, engine, cluster, masks, folder, keep_rounds, on_round, on_begin: how it runs, see
            RunOptions.

    Raises SimulationError, ConversionError, TrainingError, ProtocolError.

    Example:
        parts = datasets.split_dirichlet(labels, 100, alpha=0.5)
        clients = simulation.SplitClients({"input": images, "label": labels}, parts)
        result = archipel.simulate(network, clients, rounds=50, cohort=10, test=(test_images, test_labels))
        print(result.history[-1].tested["accuracy"])
    """
    if not 0 <= dropout < 1:
        raise SimulationError(f"dropout: {dropout} is not from 0 to below 1")
    if privacy not in ("secure", "plain"):
        raise SimulationError(f"privacy: {privacy!r} is not 'secure' or 'plain'")
    pacing = mode if isinstance(mode, Pacing) else Pacing(mode=mode)
    if system is None and pacing != Pacing():
        raise SimulationError("mode: needs a system, whose clock says who comes first; give system=System()")
    options = RunOptions(
        workers=workers, client_axis=client_axis, threads=threads, engine=engine, cluster=cluster, masks=masks,
        folder=folder, keep_rounds=keep_rounds, test_every=test_every, on_round=on_round, on_begin=on_begin,
    )  # fmt: skip
    given = list(model) if isinstance(model, list | tuple) else [model]
    bundles = [each for each in given if isinstance(each, Bundle)]
    if len(bundles) < len(given):
        from archipel.converter import Training
        from archipel.training import losses, optimizers

        training = training or Training(
            loss if loss is not None else losses.cross_entropy(),
            optimizer if optimizer is not None else optimizers.sgd(lr=0.1),
            strategy=strategy,
            strategy_options=dict(strategy_options or {}),
            epochs=epochs,
            batch_size=batch_size,
        )
        bundles = [_bundle_of(each, clients, training, folder) for each in given]
    bundle = bundles[0]
    names = [port.name for port in data_ports(bundle, bundle.manifest.schedule)]
    devices = as_clients(clients, names)
    population = len(devices)
    evaluated = None
    if held_out is not None:
        own = as_clients(held_out, names)
        if len(own) != population:
            raise SimulationError(f"held_out: has the examples of {len(own)} clients, and there are {population}")
        evaluated = own, evaluation or Evaluation()
    elif evaluation is not None:
        devices, own = hold_out_each(devices, evaluation.hold_out, seed)
        evaluated = own, evaluation
    if root is not None:
        devices = add_client(devices, as_clients([root], names).take(0))
    settings = RoundSettings(
        cohort=population if cohort is None else cohort, seed=seed, privacy=privacy, dropout=dropout,
        hyperparameters=dict(hyperparameters or {}), pacing=pacing,
        system=None if system is None else with_devices(system), aggregation=_aggregation(aggregation, tolerated),
        secure_groups=secure_groups, protocol=protocol, attack=_attack(attack, attackers), root=root is not None,
        differential_privacy=settle(differential_privacy or DifferentialPrivacy(), rounds),
    )  # fmt: skip
    models = None
    if len(bundles) > 1:
        models = SeveralModels(tuple(bundles), _assigned(model_of, len(bundles), population, root is not None))
    elif model_of is not None:
        raise SimulationError("model_of: there is one model; give a list of them")
    return run(bundle, devices, settings, rounds, test, options, evaluated, models)


def _assigned(model_of: Sequence[int] | None, models: int, population: int, root: bool) -> tuple[int, ...]:
    """Which model each client has; the server's own examples are the last client's."""
    of = [number % models for number in range(population)] if model_of is None else [int(each) for each in model_of]
    if len(of) != population:
        raise SimulationError(f"model_of: names the models of {len(of)} clients, and there are {population}")
    return (*of, *([0] if root else []))


def _bundle_of(model: Any, clients: Clients | Sequence[Any], training: Training, folder: Path | str | None) -> Bundle:
    if isinstance(model, Bundle):
        return model
    network = _imported(model, clients)
    return as_bundle(network, training, folder)


def _aggregation(given: str | Aggregation, tolerated: int) -> Aggregation:
    return given if isinstance(given, Aggregation) else Aggregation(rule=given, tolerated=tolerated)


def _attack(given: str | Attack, attackers: float | Sequence[int]) -> Attack:
    if isinstance(given, Attack):
        return given
    if isinstance(attackers, int | float):
        return Attack(name=given, share=attackers)
    return Attack(name=given, clients=tuple(int(client) for client in attackers))


def as_bundle(model: Model, training: Training, folder: Path | str | None) -> Bundle:
    """The model as a bundle in the folder, which is made once for the same model and training; None: as long as the
    bundle is in use."""
    return _scratch(model, training) if folder is None else _converted(model, training, Path(folder))


def _scratch(model: Model, training: Training) -> Bundle:
    """The model as a bundle whose files live as long as it does, since it is opened where they lie."""
    scratch = tempfile.mkdtemp(prefix="archipel-simulation-")
    try:
        bundle = _converted(model, training, Path(scratch))
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    weakref.finalize(bundle, shutil.rmtree, scratch, ignore_errors=True)
    return bundle


def _converted(model: Model, training: Training, folder: Path) -> Bundle:
    """The model as a bundle in the folder; the one that is there already, if it was made of the same."""
    # A key of its own for each conversion would give each a digest of its own, and a run that goes on needs the same.
    made_of = hashlib.sha256(model.to_bytes() + repr(training).encode()).hexdigest()
    path, publisher = folder / f"{made_of[:16]}.bundle", folder / f"{made_of[:16]}.pub"
    if path.exists() and publisher.exists():
        return open_bundle(path, [load_public_key(publisher)], folder / "cache", allow_development=True)
    make(folder)
    # Imported where a model is converted: a bundle's simulation does without, and its workers too.
    from archipel.converter import Signing, convert

    key = _signing_key()
    write_durably(publisher, key.public_key().public_bytes_raw().hex().encode() + b"\n")
    path.unlink(missing_ok=True)
    return convert(model, path, signing=Signing(key), training=training)


def _signing_key() -> Ed25519PrivateKey:
    """The user's development key; where no file can be written, one that lasts as long as this process."""
    try:
        return development_key()[0]
    except SignatureError:
        return _passing_key()


@functools.cache
def _passing_key() -> Ed25519PrivateKey:
    """Kept, since finding one takes seconds."""
    return generate_development_key()


def _imported(model: Any, clients: Clients | Sequence[Any]) -> Model:
    if isinstance(model, Model):
        return model
    first = clients.take(0) if isinstance(clients, Clients) and not isinstance(clients, Sequence) else clients[0]
    inputs = first[0] if isinstance(first, tuple) else next(iter(first.values()))
    return Model.from_torch(model, two_of(inputs))
