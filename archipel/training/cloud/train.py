"""`train` and `prepare`: a model, data and a config become a training."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from archipel.datasets import Batches, as_dataset
from archipel.datasets.dataset import Dataset, Stream
from archipel.datasets.taking import some_examples, take
from archipel.errors import CheckpointError, GraphError, NonFiniteLossError, TrainingError
from archipel.graph.model import Model
from archipel.graph.parameters import match
from archipel.mode import get_mode
from archipel.training.by_name import make_optimizer
from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.callbacks.loggers import make_loggers
from archipel.training.cloud.callbacks.standard import Checkpoints, EarlyStopping, OnEpoch, checkpoint_file
from archipel.training.cloud.checkpoints.generators import kept_generators, seed_generators
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.device import Autocast, choose_device, memory_format, require_torch, tf32, threads
from archipel.training.cloud.execution import Alone, place
from archipel.training.cloud.feed import Feed
from archipel.training.cloud.objective.objective import Objective
from archipel.training.cloud.optimizers import Rates, make_torch_optimizer
from archipel.training.cloud.parts import describe, make_augment
from archipel.training.cloud.result import Epoch, TrainResult
from archipel.training.cloud.trainer import Trainer
from archipel.training.cloud.validation import Validation

if TYPE_CHECKING:
    import torch
    from torch import nn

_SAMPLED = 256


def train(
    model: Model | nn.Module,
    data: object,
    config: TrainConfig | None = None,
    *,
    validation: object = None,
    test: object = None,
    callbacks: Sequence[Callback] = (),
    on_epoch: Callable[[Epoch], None] | None = None,
) -> TrainResult:
    """Train a network with PyTorch on one device.

    Arguments:
        model: a module of PyTorch, which is trained in place, or a Model, whose graph PyTorch runs (TorchModule).
        data: the training data, anything that `archipel.datasets.as_dataset` takes: `(inputs, labels)`, a dict of
            arrays, a path, a data set.
        config: what to minimize, how, and how long.
        validation: data like these, which choose the best epoch; without them the training loss does.
        test: data like these, on which the result is measured once, in the end.
        callbacks: what else happens around epochs and batches.
        on_epoch: called with every Epoch.

    With the same seed, machine and number of threads the results are equal, also of a training that was killed and
    continued from its checkpoint. The generators of PyTorch, NumPy and Python are afterwards where they were before.

    Returns:
        The module on the CPU, in evaluation mode, with the weights of its best epoch, the history, and the Model.

    Raises:
        TrainingError: data, labels, settings or the device are wrong, or there is too little memory.
        NonFiniteLossError: NaN in the data, or training diverged.
        DatasetError: examples cannot be read.
        CheckpointError: the checkpoint cannot be read or written, or is of another training.
        MissingExtraError: PyTorch, torchmetrics or a logger is not installed.

    Example:
        result = archipel.train(network, (x, y), TrainConfig(epochs=20, patience=5), validation=(x_val, y_val))
        print(result.best.metrics["accuracy"])
        result.model.save("network.onnx")
    """
    require_torch()
    import torch

    config = TrainConfig() if config is None else config
    measured = None if test is None else as_dataset(test)  # a file that is missing shows before the training
    own = [*callbacks, *([] if on_epoch is None else [OnEpoch(on_epoch)])]
    with threads(config.threads), tf32(config.tf32), kept_generators(), _joined(config):
        learning = _learning(model)
        trainer = prepare(model, data, config, validation=validation, callbacks=own)

        def conclude() -> TrainResult:
            module = trainer.finish()
            tested = {} if measured is None or trainer.stop else trainer.evaluate(measured)
            # The caller gets the usual layout: other code need not expect channels-last weights.
            module.to("cpu").eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(learning.get(name, parameter.requires_grad))
            return TrainResult(module, tuple(trainer.history), not trainer.stop, _example(trainer), tested)

        return trainer.run(conclude)


def prepare(
    model: Model | nn.Module,
    data: object,
    config: TrainConfig | None = None,
    *,
    validation: object = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """The pieces of a training, for a loop of one's own: `step`, `evaluate`, `save`, `load`.

    Arguments as for `train`. It seeds all generators and moves the module to its device; if the config has a checkpoint
    that is there, it reads it.

    Raises what `train` raises for wrong arguments.

    Example:
        trainer = prepare(network, (x, y), TrainConfig(epochs=1))
        for batch in batches:
            trainer.step(dict(zip(("input", "label"), batch)))
    """
    require_torch()
    config = TrainConfig() if config is None else config
    if not isinstance(config, TrainConfig):
        raise TrainingError(f"train: config must be a TrainConfig, is {type(config).__name__}")
    seed_generators(config.seed)
    module = _as_module(model)
    device = _device(config)
    dataset = as_dataset(data)
    graph = getattr(module, "source", None)
    graph_inputs = list(getattr(module, "input_names", ()))
    objective = Objective(config, list(dataset.fields), [each.name for each in graph.outputs] if graph else [])
    if graph is not None:
        objective.check(graph)
    feed = Feed(module, list(dataset.fields), objective.labels, config.inputs, graph_inputs, config.next_token)
    _choose_trainable(module, config.trainable)
    _check_finite(module)
    # Before the optimizer is made and the checkpoint read: their tensors take the parameters' device and layout.
    module.to(device)
    feed.layout = memory_format(module, device)
    module.to(memory_format=feed.layout)  # type: ignore[call-overload]
    compiled = bool(config.compile) and get_mode() == "graph"
    execution = place(module, config.parallel, device, compiled, lambda: _twin(module), _planning(config))
    if execution.processes > 1:
        # Processes that compute the same examples draw alike: what each of them has whole must not differ.
        seed_generators(config.seed + execution.rank)
    batches = _batches(dataset, config, execution)
    optimizer, rates, described = _optimizer(execution.parameters(), config, _updates(batches, config), device)
    autocast = Autocast(config.precision, device)
    check = Validation(execution, config, device, feed, objective, validation, autocast)
    # When a checkpoint is read or written, not before: it reads some of the data.
    made_with = cache(lambda: {**_made_with(config, module, dataset), "optimizer": described})
    ema = None
    if config.ema is not None:
        from archipel.training.cloud.callbacks.ema import MovingAverage

        ema = MovingAverage(execution.parameters(), config.ema)
    # The average before the checkpoint, which has it; the checkpoint before other callbacks, one of which may raise.
    standard: list[Callback] = [] if ema is None else [ema]
    if config.patience is not None:
        standard.append(EarlyStopping(config.patience))
    if config.checkpoint is not None:
        standard.append(Checkpoints(Path(config.checkpoint), config.checkpoint_every))
    trainer = Trainer(
        execution, config, device, feed, objective, batches, optimizer, rates, make_augment(config.augment), check, ema,
        [*standard, *(make_loggers(config) if execution.first else []), *callbacks], made_with,
    )  # fmt: skip
    _resume(trainer, config)
    return trainer


def _planning(config: TrainConfig) -> dict[str, Any]:
    """What the planner of `parallel` has to know."""
    from archipel.training.cloud.planner.compute import OPTIMIZERS

    named = config.optimizer.get("name") if isinstance(config.optimizer, Mapping) else config.optimizer
    # It matters for time and memory alone; most others keep as much as Adam.
    known = named if isinstance(named, str) and named in OPTIMIZERS else "adam"
    return {
        "batch_size": config.batch_size, "cluster": config.cluster, "optimizer": known,
        "sync_batch_norm": config.sync_batch_norm,
    }  # fmt: skip


def _as_module(model: object) -> nn.Module:
    import torch

    if isinstance(model, Model):
        from archipel.training.cloud.graphs.torch_module import TorchModule

        return TorchModule(model)
    if not isinstance(model, torch.nn.Module):
        kind = type(model)
        raise TrainingError(
            f"train expects a torch.nn.Module or an archipel.Model, got {kind.__module__}.{kind.__qualname__}; give "
            "the network itself, not a class, a path or its state_dict"
        )
    if not any(True for _ in model.parameters()):
        raise TrainingError("train: the module has no parameters; nothing can be trained")
    return model


def _batches(dataset: Dataset | Stream, config: TrainConfig, execution: Alone) -> Batches:
    if config.batch_size % execution.world:
        raise TrainingError(
            f"batch_size: {config.batch_size} examples cannot be divided evenly among {execution.world} processes; "
            f"make it a multiple of {execution.world}"
        )
    return Batches(
        dataset, config.batch_size // execution.world, seed=config.seed % 2**32, rank=execution.rank,
        world=execution.world, pad=False, prefetch=2 if config.workers else 0, workers=config.workers or 1,
    )  # fmt: skip


def _updates(batches: Batches, config: TrainConfig) -> int | None:
    """The updates of the whole training; None where the data have no known length."""
    if config.steps is not None:
        return config.steps
    if not isinstance(batches.dataset, Dataset) or config.most_epochs is None:
        return None
    return max(len(batches) * config.most_epochs // config.accumulate, 1)


@contextmanager
def _joined(config: TrainConfig) -> Iterator[None]:
    """A context in which the processes that torchrun started work together, where the config says so."""
    from archipel.training.cloud.parallel import processes, under_torchrun

    alone = config.parallel == "none" or (config.parallel == "auto" and not under_torchrun())
    if alone or _is_joined():  # the caller may have joined them
        yield
        return
    with processes(device=None if config.device == "auto" else config.device.partition(":")[0]):
        yield


def _device(config: TrainConfig) -> torch.device:
    import torch

    device = choose_device(config.device)
    # `processes` has chosen each process's own GPU.
    own = config.parallel != "none" and device.type == "cuda" and _is_joined()
    return torch.device("cuda", torch.cuda.current_device()) if own else device


def _is_joined() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _twin(module: nn.Module) -> nn.Module:
    """A second module like it: the placed one keeps its parameters in parts."""
    source = getattr(module, "source", None)
    if source is None:
        return copy.deepcopy(module).to("cpu")
    from archipel.training.cloud.graphs.torch_module import TorchModule

    return TorchModule(source)


def _learning(model: object) -> dict[str, bool]:
    """Which parameters of a caller's module learn: `trainable` is of one training, and no later one freezes by it."""
    import torch

    named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    return {name: parameter.requires_grad for name, parameter in named}


def _choose_trainable(module: nn.Module, patterns: str | Sequence[str]) -> None:
    if patterns == "*":
        return
    named = dict(module.named_parameters())
    try:
        chosen = set(match(list(named), patterns))
    except GraphError as error:
        raise TrainingError(f"trainable: {error}") from None
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)


def _check_finite(module: nn.Module) -> None:
    """Raise NonFiniteLossError for a module that begins with NaN, in place of advice about the learning rate."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.device.type != "meta" and not bool(parameter.isfinite().all()):
            raise NonFiniteLossError(
                f"train: parameter {name!r} has NaN or infinite numbers before the first update; give the network "
                "weights that are finite, such as those that its constructor draws"
            )


def _optimizer(
    parameters: Sequence[nn.Parameter], config: TrainConfig, steps: int | None, device: torch.device
) -> tuple[torch.optim.Optimizer, Rates | None, str]:
    """The optimizer, its rates, and what it is in words."""
    import torch

    if not parameters:
        raise TrainingError("train: all parameters are frozen; name some with trainable")
    if callable(config.optimizer):
        if config.schedule is not None:
            raise TrainingError("schedule: goes with an optimizer of training.optimizers, not with a function")
        made = config.optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise TrainingError(f"optimizer: the function must return a torch.optim.Optimizer, got {made!r}")
        return made, None, describe(config.optimizer)
    optimizer = make_optimizer(config.optimizer, config.schedule, steps)
    return make_torch_optimizer(optimizer, parameters, config.decay, device), Rates(optimizer), repr(optimizer)


def _made_with(config: TrainConfig, module: nn.Module, dataset: Dataset | Stream) -> dict[str, Any]:
    """What must be equal for a training to continue: settings, data (shapes, some examples), the tensors' shapes."""
    names = ("seed", "batch_size", "accumulate", "clip", "ema", "precision", "decay", "next_token", "trainable")
    facts: dict[str, Any] = {name: describe(getattr(config, name)) for name in names}
    facts |= {"loss": describe(config.loss), "augment": describe(config.augment)}
    tensors = repr([(name, list(tensor.shape)) for name, tensor in module.state_dict().items()])
    facts["network (CRC-32)"] = zlib.crc32(tensors.encode())
    facts["fields"] = ", ".join(f"{name}: {field}" for name, field in dataset.fields.items())
    if isinstance(dataset, Dataset):
        facts["examples"] = len(dataset)
        # Some of both ends: enough to notice another data set, without reading all of it.
        rows = np.unique(np.r_[: min(_SAMPLED, len(dataset)), max(len(dataset) - _SAMPLED, 0) : len(dataset)])
        content = take(dataset, rows.astype(np.intp))
        facts["examples (CRC-32)"] = zlib.crc32(b"".join(content[name].tobytes() for name in sorted(content)))
    return facts


def _resume(trainer: Trainer, config: TrainConfig) -> None:
    if config.checkpoint is None:
        return
    path = checkpoint_file(Path(config.checkpoint))
    if not path.exists():
        return
    if not config.resume:
        raise CheckpointError(
            f"{path} is the checkpoint of an earlier training; set resume (--resume) to go on from it, delete it, or "
            "name another folder"
        )
    trainer.load(path)


def _example(trainer: Trainer) -> tuple[Any, ...]:
    """Two examples as the module takes them, for an export."""
    return trainer.inputs(some_examples(trainer.batches.dataset))
